#!/usr/bin/env bash
# Cuts a release: version, changelog, packages, bill of materials, checksums, commit, tag. It works in a copy of the checkout, and
# the branch moves only if everything has succeeded. It pushes nothing.
#   scripts/release.sh VERSION              such as 0.2.0; says what to push at the end
#   scripts/release.sh --dry-run VERSION    the same without commit and tag; the packages lie in target/package/
#   scripts/release.sh --packages [TAG]     only packages, bill, notes and checksums, of the version that Cargo.toml has, into
#                                           target/package/; a TAG must be of that version. The workflow file calls it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
command -v cargo >/dev/null || source "$HOME/.cargo/env"
PACKAGES=$ROOT/target/package

# The version of the workspace in the current directory.
version_here() { sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1; }

# The section of a version in the changelog, without its heading.
notes_of() { awk -v heading="## $1 " 'index($0, heading) == 1 { on = 1; next } /^## / { on = 0 } on' CHANGELOG.md; }

packages() {
    local version tag=${1:-}
    version=$(version_here)
    [ -z "$tag" ] || [ "$tag" = "v$version" ] || die "the tag is $tag, but Cargo.toml has version $version"
    [ -n "$(notes_of "$version")" ] || die "CHANGELOG.md has no section $version"
    scripts/package.sh
    section "bill of materials"
    "$(command -v python3 || echo "$PYTHON")" scripts/sbom.py >"$PACKAGES/stepfs-$version.cdx.json"
    note "$(grep -c '"purl"' "$PACKAGES/stepfs-$version.cdx.json") crates"
    notes_of "$version" >"$PACKAGES/NOTES.md"
    # Who finds a store needs no package for this one.
    cp tools/read_store.py "$PACKAGES/"
    section "checksums"
    # All are summed up before the file of the sums exists.
    (cd "$PACKAGES" && rm -f SHA256SUMS && sums=$(sha256sum -- *) && tee SHA256SUMS <<<"$sums")
}

dry=''
case ${1:-} in
--packages)
    packages "${2:-}"
    exit 0
    ;;
--dry-run) dry=yes && shift ;;
esac
version=${1:-}
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || die "name a version such as 0.2.0"
former=$(version_here)
[ "$version" != "$former" ] && [ "$(printf '%s\n' "$version" "$former" | sort -V | tail -1)" = "$version" ] ||
    die "the version must be above $former"
! git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null || die "the tag v$version is there already"
[ -z "$(git status --porcelain)" ] || die "the checkout has changes; commit them first"
grep -q '^## Unreleased$' CHANGELOG.md || die "CHANGELOG.md has no section Unreleased"

# A released format stays readable: nobody may have touched the stores of former releases.
for tag in $(git tag --list 'v*'); do
    changed=$(git diff --name-only --diff-filter=MDR "$tag" HEAD -- tests/golden | grep -v 'README.md$' || true)
    [ -z "$changed" ] || die "golden stores of $tag have changed: $(head -3 <<<"$changed" | tr '\n' ' ')"
done

copy=$(mktemp -d)
trap 'git -C "$ROOT" worktree remove --force "$copy/stepfs" 2>/dev/null || true; rm -rf "$copy"' EXIT
git worktree add --quiet --detach "$copy/stepfs" HEAD
# What is built stays for the next time.
mkdir -p "$ROOT/target"
ln -s "$ROOT/target" "$copy/stepfs/target"
cd "$copy/stepfs"

section "version $version"
sed -i "0,/^version = \"$former\"/s//version = \"$version\"/" Cargo.toml
sed -i "s/^## Unreleased\$/## Unreleased\n\n## $version - $(date +%F)/" CHANGELOG.md
# Only the members' own versions change. A machine that never built the fuzzer asks the registry for its dependencies.
cargo update --workspace --quiet
(cd fuzz && cargo update --workspace --quiet)
[ "$(version_here)" = "$version" ] || die "Cargo.toml has no version of its own in [workspace.package]"
git --no-pager diff --stat
notes_of "$version" | sed -n 1,8p
packages "v$version"

if [ -n "$dry" ]; then
    note "a dry run: no commit, no tag; the packages are in target/package/"
    exit 0
fi
git commit --quiet --all --message "Release $version"
git tag --annotate "v$version" --message "stepfs $version"
cd "$ROOT"
git merge --quiet --ff-only "v$version"
note "released here. To publish it: git push --follow-tags"
