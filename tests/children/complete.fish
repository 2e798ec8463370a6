# Print each LINE behind a > and what fish completes at its end, by what is installed in XDG_DATA_DIRS: LINE...
for line in $argv
  echo ">$line"
  complete -C $line
end
