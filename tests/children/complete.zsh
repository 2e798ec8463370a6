# As a .zshrc: write to OUT each line of LINES_TO_COMPLETE behind a > and what zsh completes at its end, by what is in SITE.
# All that completes words ends in compadd, and that can tell what matches.
fpath=($SITE $fpath)
autoload -Uz compinit
compinit -D -u
compadd() {
  local -a words
  if (( ! ${argv[(I)-[OAD]]} )); then
    builtin compadd -A words "$@"
    print -rl -- $words >> $OUT
  fi
  builtin compadd "$@"
}
complete-lines() {
  local line
  for line in ${(f)LINES_TO_COMPLETE}; do
    print -r -- ">$line" >> $OUT
    BUFFER=$line CURSOR=$#line
    zle list-choices
  done
  exit
}
zle -N zle-line-init complete-lines
