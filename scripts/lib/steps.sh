# Runs named, bounded steps and prints at the end which failed. Sourced by .ci/run and .ci/long.

step_table=""
steps_failed=0
step_log=$(mktemp)
trap 'rm -f "$step_log"' EXIT

# step SECONDS NAME COMMAND...: runs COMMAND for at most SECONDS; its output is also written to $step_log. A failure is
# recorded, and the next step still runs, so that one run shows all failures.
step() {
    local limit=$1 name=$2 begin=$SECONDS status=0 result=ok
    shift 2
    printf '\n=== %s\n' "$name"
    timeout --kill-after=10 "$limit" "$@" </dev/null 2>&1 | tee -a "$step_log" || status=${PIPESTATUS[0]}
    if [ "$status" -ne 0 ]; then
        result="FAILED (exit $status)"
        [ "$status" -ne 124 ] && [ "$status" -ne 137 ] || result="FAILED (not done after $limit s)"
        steps_failed=$((steps_failed + 1))
    fi
    step_table+=$(printf '%5d s  %-46s %s' "$((SECONDS - begin))" "$name" "$result")$'\n'
}

# chosen SECONDS NAME COMMAND...: runs a step, if `words` is empty, or if one of them is in its name.
chosen() {
    local word
    [ "${#words[@]}" -gt 0 ] || { step "$@"; return; }
    for word in "${words[@]}"; do [[ $2 != *"$word"* ]] || { step "$@"; return; }; done
}

# beside FUNCTION: begins the steps of FUNCTION in the background, where they run while no other process needs the
# processor. `join_steps` shows their output. Only for steps that build or read, in separate target directories: steps
# that measure time run alone.
beside() {
    beside_files=$(mktemp -d)
    (
        trap - EXIT
        # Child processes inherit the priority.
        chrt --idle --pid 0 "$BASHPID" || renice -n 19 -p "$BASHPID"
        step_log=$beside_files/log step_table="" steps_failed=0
        : >"$step_log"
        "$@"
        printf '%s' "$step_table" >"$beside_files/table"
        echo "$steps_failed" >"$beside_files/failed"
    ) >"$beside_files/output" 2>&1 &
    beside_pid=$!
}

# join_steps: waits for the steps that `beside` began. If they did not finish, that is a failure.
join_steps() {
    wait "$beside_pid" || true
    cat "$beside_files/output"
    cat "$beside_files/log" >>"$step_log"
    step_table+=$(cat "$beside_files/table")$'\n'
    steps_failed=$((steps_failed + $(cat "$beside_files/failed" || echo 1)))
    rm -rf "$beside_files"
}

# print_steps: prints the table of the steps with their times.
print_steps() {
    printf '\n=== Steps\n%s%5d s  in all\n' "$step_table" "$SECONDS"
}
