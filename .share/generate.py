"""Write the man page and the completions, out of the tables that --help comes from: generate.py DIRECTORY"""
import pathlib
import re
import signal
import sys
from argparse import REMAINDER, ArgumentParser

import shtab
from argparse_manpage.manpage import Manpage

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import pidlock  # noqa: E402

# shtab knows the options. Behind them, the shells themselves complete the command as a command.
BASH = """
_pidlock() {
  local line  # _shtab_pidlock has it as a global
  local at=1 ended= this word=${COMP_WORDS[COMP_CWORD]} option=${COMP_WORDS[COMP_CWORD - 1]}
  local takes_value="^(NAMES|-[LETTERS]*[VALUE_LETTERS])$"
  while (( at < COMP_CWORD )) && [[ ! $ended ]]; do
    this=${COMP_WORDS[at]}
    if [[ $this == -- ]]; then
      ended=1
      (( at += 1 ))
    elif [[ $this == --* && ${COMP_WORDS[at + 1]} == = ]]; then  # --pidfile=FILE is three words
      (( at += 3 ))
    elif [[ $this =~ $takes_value ]]; then
      (( at += 2 ))
    elif [[ $this == -* ]]; then
      (( at += 1 ))
    else
      ended=1
    fi
  done
  if (( at > COMP_CWORD )); then
    [[ $word == = ]] && word=
    [[ $option == = ]] && option=${COMP_WORDS[COMP_CWORD - 2]}
    [[ $option == -[!-]* ]] && option=-${option: -1}
    COMP_WORDS=(pidlock "$option" "$word") COMP_CWORD=2
    _shtab_pidlock
  elif [[ ! $ended && $word == -* ]]; then
    _shtab_pidlock
  elif declare -F _command_offset >/dev/null; then  # bash-completion has it
    _command_offset "$at"
  elif (( at == COMP_CWORD )); then
    local IFS=$'\\n'
    COMPREPLY=($(compgen -c -- "$word"))
  fi
}
complete -o bashdefault -o default -F _pidlock pidlock
"""
FISH_PATH = "(%s (string replace -r -- '^-[^=]*=' '' (commandline -ct)))"  # shtab's own does not know --pidfile=FILE
FISH = """
function _shtab_pidlock_using
  _shtab_pidlock_scan
  test $_shtab_pidlock_npos -eq 0
end
complete -c pidlock -n 'not _shtab_pidlock_using; or not string match -q -- "-*" (commandline -ct)' \\
  -x -a "(__fish_complete_subcommand -p $_shtab_pidlock_opts_with_value)"
"""


def make_parser():
    """Return an argparse parser with the options of pidlock's tables, for the generators to read."""
    parser = ArgumentParser("pidlock", add_help=False, description=pidlock.HELP.split("\n\n")[1])
    group = parser.add_argument_group("options")
    for option in pidlock.COMMON_OPTIONS + pidlock.MORE_OPTIONS:
        value = {"action": "store_true"} if option.metavar is None else {"metavar": option.metavar}
        if option.metavar == pidlock.OPTIONAL:
            value = {"metavar": "FILE", "nargs": "?"}
        if option.convert is pidlock._parse_strategy:
            value["choices"] = pidlock.STRATEGIES
        group.add_argument(*option.names[:2], help=option.help, **value)
    return parser


def make_page():
    parser = make_parser()
    values = {action.metavar for action in parser._actions if action.metavar} | {"COMMAND", "ARG"}

    def in_roff(text):
        text = text.replace("-", r"\-")
        text = re.sub(r"(?:(?<=^)|(?<=[\s[]))(pidlock|(?:\\-){1,2}\w[\w\\-]*)", r"\\fB\1\\fR", text, flags=re.M)
        return re.sub(r"\b(%s)\b" % "|".join(values), r"\\fI\1\\fR", text)

    def invocation(action):  # as --help has it
        value = action.metavar and {"?": "[=%s]"}.get(action.nargs, " %s") % action.metavar
        return in_roff(", ".join(action.option_strings) + (value or ""))

    description, parser.description = parser.description, None
    page = Manpage(parser)
    page.description = pidlock.__doc__.split(".")[0].replace("Run", "run")
    page.source = "pidlock " + pidlock.__version__
    page.manual = "User Commands"
    page.mf._format_action_invocation = invocation
    page.add_section("synopsis", "=", ".nf\n%s\n.fi" % in_roff(re.sub("^ +", "", pidlock.USAGE, flags=re.M)))
    page.add_section("description", "=", in_roff(description) + "\n")
    page.add_section("exit status", "=", "\n".join(
        ".TP\n%s\n%s" % (in_roff(status), in_roff(meaning)) for status, meaning in statuses_of_readme()))
    page.parse_include(str(HERE / "sections"))
    text = str(page).replace(page.date.replace("-", r"\-"), page.date)  # mandoc wants it so
    return re.sub("\n\n+", "\n", text)  # mandoc shows an empty line beside the one that each macro leaves


def statuses_of_readme():
    section = (HERE.parent / "README.md").read_text(encoding="utf-8").split("## Exit status\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.M)[1:]
    return rows + re.findall(r"`(--\w+)`: ([^.]+)\.", section)


def make_completion(shell):
    parser = make_parser()
    actions = {action.dest: action for action in parser._actions}
    for name in ("pidfile", "log", "metrics"):
        actions[name].complete = {**shtab.FILE, "fish": FISH_PATH % "__fish_complete_path"}
    actions["sweep"].complete = {**shtab.DIRECTORY, "fish": FISH_PATH % "__fish_complete_directories"}
    actions["signal"].choices = [name[3:] for name in signal.Signals.__members__ if not name.startswith("SIGRT")]
    actions["fence"].nargs = 0  # its value stands behind a =, never in the next word
    parser.add_argument("command", nargs=REMAINDER).complete = {"zsh": "_normal"}
    text = shtab.complete(parser, shell)
    if shell == "bash":
        words = {word: action.nargs is None for action in parser._actions for word in action.option_strings}
        names = "|".join(word for word, takes_value in words.items() if takes_value and word.startswith("--"))
        letters = ["".join(word[1] for word in words if word[1] != "-" and words[word] is wanted)
                   for wanted in (False, True)]
        return text + BASH.replace("NAMES", names).replace("VALUE_LETTERS", letters[1]).replace("LETTERS", letters[0])
    if shell == "zsh":  # -S: what follows -- is no option; = and +: --pidfile=FILE and -pFILE are one word
        text = text.replace("_arguments -C -s ", "_arguments -C -s -S ")
        text = re.sub(r'(--[\w-]+)(}"|)(?=\[[^\n]*\]:)', r"\1=\2", text)
        return re.sub(r"{(-\w),(--[\w-]+=)", r"{\1+,\2", text)
    return text + FISH


def main(directory):
    for name, text in [
        ("man/man1/pidlock.1", make_page()),
        ("bash-completion/completions/pidlock", make_completion("bash")),
        ("zsh/site-functions/_pidlock", make_completion("zsh")),
        ("fish/vendor_completions.d/pidlock.fish", make_completion("fish")),
    ]:
        path = pathlib.Path(directory, name)
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
