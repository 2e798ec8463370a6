# Print each LINE behind a > and what bash completes at its end, by what is installed in XDG_DATA_DIRS: LINE...
. /usr/share/bash-completion/bash_completion
_completion_loader pidlock
for line; do
  COMP_LINE=$line COMP_POINT=${#line} COMP_TYPE=9 COMP_KEY=9
  read -ra COMP_WORDS <<< "${line//=/ = }"
  if [[ $line == *" " ]]; then COMP_WORDS+=(""); fi
  COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
  COMPREPLY=()
  _pidlock pidlock "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
  printf '%s\n' ">$line" "${COMPREPLY[@]}"
done
