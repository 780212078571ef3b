# Functions that the scripts share. Sourced from the repository's root.

# need_rust: ends with a remedy if there is no cargo.
need_rust() {
    command -v cargo >/dev/null && return
    echo "cargo is not on the PATH: install Rust 1.88 or later with rustup" >&2
    exit 2
}

# name_linker: the linker that rustc calls, by its path. Builds that set it, and builds that do not, share nothing that is linked.
name_linker() {
    local host
    host=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
    export "CARGO_TARGET_${host}_LINKER=$(realpath "$(command -v cc)")"
}

# Whether install_packages may install; scripts/test clears it unless it has --install.
may_install=yes

# need_linker: rustc links through cc; on Debian and Ubuntu a missing one is installed.
need_linker() {
    command -v cc >/dev/null && return
    install_packages gcc libc6-dev
}

# install_packages NAME...: with apt-get, as root or through sudo.
install_packages() {
    local sudo=
    [ "$(id -u)" = 0 ] || sudo=sudo
    if [ -z "$may_install" ]; then
        echo "missing: $*; run this again with --install, or install them: apt-get install --no-install-recommends $*" >&2
        exit 2
    fi
    if ! command -v apt-get >/dev/null; then
        echo "please install: $* (only Debian and Ubuntu are set up automatically)" >&2
        exit 2
    fi
    $sudo apt-get update -q && $sudo apt-get install -q -y -o DPkg::Lock::Timeout=120 --no-install-recommends "$@"
}

# lint_builds: the following builds of the workspace run clippy, too, and its findings are errors. Cargo compares the arguments of clippy
# with those of the last build, so they are set here and not in the compiler's wrapper.
lint_builds() {
    export RUSTC_WORKSPACE_WRAPPER=$PWD/scripts/lib/test-rustc
    # What `cargo clippy -- -D warnings` passes on.
    export CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
}

# need_tool NAME [FEATURE [LEVEL]]: installs `cargo NAME`, unless there is one. It is built without optimisation, unless at this LEVEL:
# such a tool runs for seconds, and optimised it takes minutes to build.
need_tool() {
    cargo "$1" --version >/dev/null 2>&1 && return
    CARGO_PROFILE_RELEASE_OPT_LEVEL=${3:-0} CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=64 \
        CARGO_PROFILE_RELEASE_DEBUG=0 cargo install --locked "cargo-$1" ${2:+--features "$2"}
}

# need_services: installs missing programs that tests of stores and launchers start, or prints which tests are skipped
# without them. Each of those tests reports that it was skipped. If an init system runs, Debian starts redis-server and
# etcd; tests start their own, on other ports.
need_services() {
    local missing=() entry
    for entry in redis-server=redis-server etcd=etcd-server mpirun=openmpi-bin; do
        command -v "${entry%=*}" >/dev/null || missing+=("${entry#*=}")
    done
    [ "${#missing[@]}" -gt 0 ] || return 0
    if [ -n "$may_install" ]; then
        (install_packages "${missing[@]}") && return
    fi
    echo "not installed: ${missing[*]}. The tests of those stores and launchers are skipped. To run them, use --install, or:"
    echo "  apt-get install --no-install-recommends ${missing[*]}"
}

# count_tests LOG: adds up the closing lines of nextest, cargo test and scripts/rxe-vm/suite in LOG, each test once: a
# plain run skipped the tests that the virtual machine ran later, and the tests that tell_skips counts in LOG passed
# without trying their rule. Prints `N passed, N failed, N skipped`, alone on its line.
count_tests() {
    sed 's/\x1b\[[0-9;]*m//g' "$1" | awk '
        function number_before(word,   parts, words) {
            if (match($0, "[0-9]+ " word)) {
                split(substr($0, RSTART, RLENGTH), words, " ")
                return words[1]
            }
            return 0
        }
        /^ *Summary \[.*tests? run:/ {
            passed += number_before("passed"); skipped += number_before("skipped")
            failed += number_before("failed") + number_before("timed out") + number_before("exec failed")
        }
        /^test result: / {
            passed += number_before("passed"); failed += number_before("failed")
            skipped += number_before("ignored")
        }
        /^verbs: [0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$/ {
            passed += $2; failed += $4; rules += $6; verbs += $2 + $4; begun += $2 + $4 + $6
        }
        /^contract: [0-9]+ tests skipped their rule$/ {
            passed -= $2; rules += $2
        }
        END {
            skipped = (skipped > begun ? skipped - begun : 0) + rules
            if (verbs > 0) printf "%d of the tests ran over verbs, in the virtual machine.\n", verbs
            if (rules > 0) printf "%d of the tests that were skipped reported that themselves, as listed above.\n", rules
            printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
        }'
}

# tests_ran LOG FILTER...: whether LOG, the output of cargo test or nextest, has a test that ran, and one with each
# FILTER in its name.
tests_ran() {
    local log=$1 filter ran
    shift
    ran=$(sed 's/\x1b\[[0-9;]*m//g' "$log" | sed -nE \
        '/^test .* \.\.\. ignored/d; s/^test ([^ ]+) .*\.\.\..*/\1/p; s/^ *[A-Z]+ \[ *[0-9.]+s\] .* ([^ ]+)$/\1/p')
    for filter in "${@:-}"; do
        grep -qF -- "$filter" <<<"$ran" && [ -n "$ran" ] && continue
        echo "no test ran${filter:+ whose name has $filter}" >&2
        return 1
    done
}

# list_ignored_tests LOG: each test that was left out, with the reason in its attribute; tests that need an RDMA device
# only if LOG does not show that the virtual machine ran them.
list_ignored_tests() {
    local found
    found=$(git grep -nE '^[^/]*\[ignore' -- '*.rs' || true)
    if grep -qE '^verbs: [1-9][0-9]* passed' "$1"; then
        found=$(grep -v 'ignore = "needs an RDMA device' <<<"$found" || true)
    fi
    [ -n "$found" ] || return 0
    echo "Tests that were left out, and why:"
    sed -E 's/^([^:]+):([0-9]+):.*\[ignore( = "(.*)")?\].*/  \1:\2  \4/' <<<"$found"
}

# The one set of features that the whole workspace's tests are built with: TLS, stores in Redis and etcd, arrays of other
# crates, and bugs that do nothing unless a test plants them. scripts/check-stub-build checks the code without TLS.
# shellcheck disable=SC2034 # used by the scripts that source this
test_features=(--features "$(printf '%s,' tensorwire-{fabric,rendezvous,cli,collective}/test-certificates)tensorwire-book/tls,tensorwire-book/arrays,$(printf '%s,' tensorwire/{trace,tls,redis,etcd,ndarray,safetensors,dlpack})tensorwire-sim/planted-bugs")
