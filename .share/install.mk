PREFIX ?= /usr/local
TO = $(DESTDIR)$(PREFIX)
BUILD := build
SHARED := share/man/man1/pidlock.1 share/bash-completion/completions/pidlock \
    share/zsh/site-functions/_pidlock share/fish/vendor_completions.d/pidlock.fish
INSTALL_PYTHON = $(if $(filter command line,$(origin PYTHON)),$(PYTHON),/usr/bin/python3)

.PHONY: build install install-command uninstall

# Man page and completions. Who runs this before sudo make install has nothing written here by root.
build: $(BUILD)/share
$(BUILD)/share: pidlock.py README.md .share/generate.py .share/sections | $(VENV)/ready
	rm -rf "$@" "$@.new"
	$(BIN)/python -B .share/generate.py "$@.new"
	mv "$@.new" "$@"

install: install-command $(BUILD)/share
	for file in $(SHARED); do install -D -m 644 "$(BUILD)/$$file" "$(TO)/$$file" || exit; done

# Compiled beforehand and started with -IS: no site start-up, and nobody's PYTHONPATH is imported into root's cron.
install-command:
	$(if $(filter /%,$(firstword $(PREFIX))),,$(error PREFIX is no absolute path: $(PREFIX)))
	install -D -m 644 pidlock.py "$(TO)/lib/pidlock/pidlock.py"
	umask 022 && $(INSTALL_PYTHON) -m compileall -q -d "$(PREFIX)/lib/pidlock" "$(TO)/lib/pidlock"
	sed 's|@PYTHON@|$(INSTALL_PYTHON)|; s|@PREFIX@|$(PREFIX)|' .share/launcher | \
	    install -D -m 755 /dev/stdin "$(TO)/bin/pidlock"

uninstall:
	for file in bin/pidlock $(SHARED); do rm -f "$(TO)/$$file"; done
	rm -rf "$(TO)/lib/pidlock"
