# Compares the skipped rules of the fabric contract, which tests report, with the committed list. Sourced from the
# repository's root.
#
# A test reports a skip by a line `SKIPPED: PLACE TEST REASON`, where PLACE is a fabric, or a fabric with
# `-between-processes`, and TEST a full name, which ends in `MODULE::RULE`. With TENSORWIRE_TEST_SKIPPED=FILE tests
# write the line to FILE, too.

contract_exceptions=crates/fabric/tests/contract/exceptions.txt

# listed_skips PLACE...: the rules that the committed list has for these places, one per line.
listed_skips() {
    local place
    for place in "$@"; do
        sed -n "s/^$place \\([^ ]*\\) .*/\\1/p" "$contract_exceptions"
    done | LC_ALL=C sort
}

# skips_of FILE MODULES: the rules that tests of these modules (MODULES::MODULE::RULE) skipped, by their lines in FILE.
skips_of() {
    sed -n "s/^SKIPPED: [^ ]* \\(.*::\\)\\{0,1\\}$2::\\([a-z_]*::[a-z0-9_]*\\) .*/\\2/p" "$1" | LC_ALL=C sort -u
}

# same_skips FILE MODULES PLACE...: whether the tests of these modules skipped the rules that the list has for these
# places. Prints the difference.
same_skips() {
    local file=$1 modules=$2
    shift 2
    diff <(listed_skips "$@") <(skips_of "$file" "$modules") >&2 && return
    echo "$modules: < is listed in $contract_exceptions for $*, > was skipped" >&2
    return 1
}

# tell_skips FILE: prints the number of tests that passed without trying their rule, by place and reason; and the line
# that count_tests reads.
tell_skips() {
    local count
    count=$(sort -u "$1" | wc -l)
    [ "$count" -gt 0 ] || return 0
    echo "Rules of the contract that were skipped ($contract_exceptions), and tests whose program is not installed:"
    sort -u "$1" | sed -E 's/^SKIPPED: ([^ ]+) [^ ]+ (.*)/\1: \2/' | sort | uniq -c
    echo "contract: $count tests skipped their rule"
}
