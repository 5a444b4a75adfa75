# Points cargo, mypy and ruff at the folder that runs of CI share; sourced by .ci/run.
#
# One run at a time has it, by a lock that ends with the shell: cargo's own lock ends with the build, but programs that
# tests start lie in the same folder. A run that finds it taken, or cannot make it, builds in the checkout.

cache=${PRIMERL_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}/primerl-ci}
cache_limit_mb=15000

take_cache() {
    [ "$cache" != /primerl-ci ] && command -v flock >/dev/null || return 1
    # touch, since a redirection that fails ends the shell.
    mkdir -p "$cache/target" 2>/dev/null && touch "$cache/lock" "$cache/target/.writable" 2>/dev/null || return 1
    exec 9>>"$cache/lock"
    flock --nonblock 9
}

if take_cache; then
    # Of another compiler nothing can be used, and what changes leave behind piles up.
    compiler=$(rustc --version --verbose)
    size=$(du -sm "$cache/target" | cut -f 1)
    if [ "$compiler" != "$(cat "$cache/compiler" 2>/dev/null)" ] || [ "$size" -gt "$cache_limit_mb" ]; then
        rm -rf "$cache/target"
        printf '%s\n' "$compiler" >"$cache/compiler"
    fi
    export CARGO_TARGET_DIR="$cache/target" MYPY_CACHE_DIR="$cache/mypy" RUFF_CACHE_DIR="$cache/ruff"
    # The workspace's own crates are compiled in each run: cargo knows them by path and time, and a checkout may be made
    # where another one was, with files that are older than what was built of that.
    cargo clean --quiet $(sed -n 's/^name = "\(primerl-.*\)"$/-p \1/p' rust/*/Cargo.toml)
    [ -z "${PRIMERL_CACHE_DIR:-}" ] || export UV_CACHE_DIR="${UV_CACHE_DIR:-$cache/uv}"
    echo "== caches in $cache ($size MB compiled)"
else
    echo "== no shared caches: $cache is in use, or cannot be made"
fi
