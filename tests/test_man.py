"""The man page: made from the tables of --help, no man complains of it, and it says what --help and the README say."""
import os
import re
import shlex
import shutil
import subprocess

import pytest
from conftest import PIDLOCK, ROOT
from test_install import make

import pidlock

HELP = subprocess.check_output([*PIDLOCK, "--help"]).decode()
SECTIONS = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "ENVIRONMENT", "FILES", "NOTES", "EXAMPLES",
            "SEE ALSO"]


def needs(tool):
    return pytest.mark.skipif(not shutil.which(tool), reason="%s is not installed" % tool)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    build = tmp_path_factory.mktemp("man") / "build"
    make("build", "BUILD=%s" % build)
    return build / "share" / "man" / "man1" / "pidlock.1"


@pytest.fixture(scope="module")
def sections(page):
    """The page as its reader has it, at 80 columns: {heading: text without indent}."""
    environment = {**os.environ, "MANWIDTH": "80", "LC_ALL": "C.UTF-8", "GROFF_NO_SGR": "1"}
    text = subprocess.check_output(["man", "--nh", "--nj", "-P", "cat", "-l", page], env=environment).decode()
    text = re.sub(".\b", "", text)
    assert max(map(len, text.splitlines())) <= 80
    parts = re.split(r"^([A-Z][A-Z ]*)\n", text, flags=re.M)[1:]
    assert parts[::2] == SECTIONS
    return dict(zip(SECTIONS, (re.sub("^ {1,7}", "", part, flags=re.M) for part in parts[1::2])))


@pytest.mark.parametrize("command", [
    pytest.param(["mandoc", "-T", "lint", "-W", "warning"], marks=needs("mandoc")),
    pytest.param(["groff", "-man", "-ww", "-z", "-T", "utf8"], marks=needs("groff")),
    pytest.param(["man", "--warnings", "-P", "cat", "-l"], marks=needs("man")),
], ids=lambda command: command[0])
def test_no_formatter_complains(page, command):
    done = subprocess.run([*command, page], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env={**os.environ, "LC_ALL": "C.UTF-8"})
    complaints = done.stdout if command[0] == "mandoc" else b""
    assert (done.returncode, done.stderr, complaints) == (0, b"", b"")


def test_no_empty_line_adds_to_what_a_macro_leaves(page):
    """mandoc shows both, and complains of neither."""
    assert "\n\n" not in page.read_text()


@needs("man")
def test_the_synopsis_is_the_usage_of_help(sections):
    usage = HELP.split("\n\n")[0].replace("usage: ", "")
    assert sections["SYNOPSIS"].split() == usage.split() and sections["SYNOPSIS"].count("pidlock") == 3


@needs("man")
def test_the_page_has_the_options_and_texts_of_help_and_no_hidden_one(sections):
    options = dict(re.findall(r"^  (-.+?)  +(.+)$", HELP, re.M))
    found = re.findall(r"^(-.+?)(?:\n {7}| (?=tell it as JSON))(.+)$", sections["OPTIONS"], re.M)
    assert found == list(options.items())


@needs("man")
def test_the_exit_statuses_are_those_of_the_readme_and_of_help(sections):
    """The README is where the page has them from; --help has a table of its own."""
    readme = (ROOT / "README.md").read_text().split("## Exit status")[1].split("\n## ")[0].replace("`", "")
    assert ["status", "meaning", *re.findall(r"[\w+]+", sections["EXIT STATUS"])] == re.findall(r"[\w+]+", readme)
    numbers = set(re.findall(r"\d+", sections["EXIT STATUS"])) - {"130", "143"}
    assert numbers == set(re.findall(r"\d+", HELP.partition("exit status:")[2].partition("more options:")[0]))


@needs("man")
def test_the_examples_are_right_usage(sections):
    commands = re.findall(r"^ +(?:\*/5[ *]+)?pidlock (.+)$", sections["EXAMPLES"], re.M)
    parsed = [pidlock._parse(shlex.split(command)) for command in commands]
    assert len(parsed) == 9 and {options.action for options in parsed} == {
        None, pidlock._show_status, pidlock._send_signal, pidlock._sweep}


@needs("man")
def test_the_page_says_what_it_is_of_and_not_by_what_it_was_made(page, sections):
    header = r'\.TH PIDLOCK "1" "\d{4}-\d\d-\d\d" "pidlock %s" "User Commands"\n' % re.escape(pidlock.__version__)
    assert re.match(header, page.read_text())
    assert sections["NAME"].strip() == "pidlock - run a command under a lock that people can read: a pidfile"
    assert "enerated" not in page.read_text()
