# The project's commands; each is a script. `just` lists them.

default:
    @just --list

# Install everything that the tests need
setup:
    scripts/setup.sh

# Before each commit: format, lints, quick tests
check *rooms:
    scripts/check.sh {{rooms}}

# Before each merge: every check of a change
test:
    scripts/test.sh

# The long tests
nightly *names:
    scripts/nightly.sh {{names}}

# Train a small GPT into a mount
demo:
    scripts/demo.sh

# Measure
bench:
    scripts/bench.sh

# Wheel and Debian package
package:
    scripts/package.sh

# Try both in clean Debian roots
packages:
    scripts/packages.sh

# Run the recipes for containers and clusters
containers *names:
    scripts/containers.sh {{names}}

# Cut a release: `just release --dry-run 0.2.0` shows it
release *words:
    scripts/release.sh {{words}}

# Build the site from the documents
docs:
    scripts/docs.sh

# Count hard English
prose *paths:
    python3 scripts/prose.py {{paths}}
