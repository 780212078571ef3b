# Rules of the fabric contract that are skipped: what the tests said, against the committed list. Sourced from the
# repository's root.
#
# What a test says is a line `SKIPPED: PLACE TEST REASON`, where PLACE is a fabric, or a fabric with `-between-processes`,
# and TEST a full name, which ends in `MODULE::RULE`. Under TENSORWIRE_TEST_SKIPPED=FILE tests write it to FILE too.

contract_exceptions=crates/fabric/tests/contract/exceptions.txt

# listed_skips PLACE...: the rules that the committed list has for these places, one a line.
listed_skips() {
    local place
    for place in "$@"; do
        sed -n "s/^$place \\([^ ]*\\) .*/\\1/p" "$contract_exceptions"
    done | LC_ALL=C sort
}

# skips_of FILE MODULES: the rules that tests of these modules (MODULES::MODULE::RULE) said in FILE to have skipped.
skips_of() {
    sed -n "s/^SKIPPED: [^ ]* \\(.*::\\)\\{0,1\\}$2::\\([a-z_]*::[a-z0-9_]*\\) .*/\\2/p" "$1" | LC_ALL=C sort -u
}

# same_skips FILE MODULES PLACE...: whether the tests of these modules skipped what the list has for these places. Prints
# the difference.
same_skips() {
    local file=$1 modules=$2
    shift 2
    diff <(listed_skips "$@") <(skips_of "$file" "$modules") >&2 && return
    echo "$modules: < is listed in $contract_exceptions for $*, > was skipped" >&2
    return 1
}

# tell_skips FILE: the tests that passed and tried nothing, counted by place and reason; and the line that count_tests
# reads.
tell_skips() {
    local count
    count=$(sort -u "$1" | wc -l)
    [ "$count" -gt 0 ] || return 0
    echo "Rules of the contract that were skipped ($contract_exceptions), and tests whose program is not installed:"
    sort -u "$1" | sed -E 's/^SKIPPED: ([^ ]+) [^ ]+ (.*)/\1: \2/' | sort | uniq -c
    echo "contract: $count tests skipped their rule"
}
