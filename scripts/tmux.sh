#!/usr/bin/env bash
# Four panes over the logs of a run: trainer, orchestrator, env workers, inference. A log that is not there yet is waited for,
# and so is a run that has not begun.
#
#     scripts/tmux.sh [-s session] [-o output_dir]
#     scripts/tmux.sh [session] [output_dir]
#
# Called again, it shows the session that is there. `tmux kill-session -t <session>` ends it; the run goes on.
set -euo pipefail

usage="usage: scripts/tmux.sh [-s session] [-o output_dir], or [session] [output_dir]    (primerl, outputs)"
session=primerl
output_dir=outputs

refuse() {
    echo "scripts/tmux.sh: $1" >&2
    exit 2
}

while getopts ":s:o:h" option; do
    case $option in
        s) session=$OPTARG ;;
        o) output_dir=$OPTARG ;;
        h) echo "$usage"; exit 0 ;;
        :) refuse "-$OPTARG needs a value; $usage" ;;
        *) refuse "unknown option -$OPTARG; $usage" ;;
    esac
done
shift $((OPTIND - 1))
session=${1-$session}
output_dir=${2-$output_dir}
[[ $# -le 2 ]] || refuse "unknown argument $3; $usage"
[[ -n $session && $session != *[.:]* ]] || refuse "-s ${session:-\"\"}: tmux takes no empty name, and none with '.' or ':'"
[[ -n $output_dir ]] || refuse "-o is empty; give the output_dir of a run"
command -v tmux >/dev/null || refuse "tmux is not installed (Debian: apt install tmux); or: tail -F $output_dir/logs/*.log"

# Of a session with that very name, not of one that begins with it.
if tmux has-session -t "=$session" 2>/dev/null; then
    echo "session $session is there already"
else
    # A launcher writes its configs first.
    [[ -d $output_dir/configs ]] || echo "there is no run in $output_dir yet (no $output_dir/configs): its logs appear once it begins there"
    [[ $output_dir = /* ]] || output_dir=$PWD/$output_dir
    logs=$output_dir/logs
    # The panes' shell is one that is known; what it is told is quoted for it.
    follow() { printf 'exec tail -n 200 -F %q' "$logs/$1.log"; }
    # Workers come and go: whose logs there are is looked at again, until there is one.
    workers=$(printf 'cd %q 2>/dev/null; until logs=$(find envs -name "env_worker_*.log" 2>/dev/null) && [ -n "$logs" ]; do sleep 1; cd %q 2>/dev/null || true; done; exec tail -n 100 -F $(printf "%%s\\n" "$logs" | sort)' "$logs" "$logs")
    titles=(trainer orchestrator "env workers" inference)
    commands=("$(follow trainer)" "$(follow orchestrator)" "$workers" "$(follow inference)")
    tmux new-session -d -s "$session" -x 200 -y 50 bash -c "${commands[0]}"
    for index in 1 2 3; do
        tmux split-window -t "=$session:" bash -c "${commands[index]}"
        # Each is halved otherwise, and there is no room for the last.
        tmux select-layout -t "=$session:" tiled >/dev/null
    done
    tmux set-option -t "=$session:" pane-border-status top >/dev/null
    tmux set-option -t "=$session:" pane-border-format ' #{pane_title} ' >/dev/null
    mapfile -t panes < <(tmux list-panes -t "=$session:" -F '#{pane_id}')
    for index in 0 1 2 3; do
        tmux select-pane -t "${panes[index]}" -T "${titles[index]}"
    done
    tmux select-pane -t "${panes[0]}"
    echo "session $session over $logs"
fi
# Without a terminal there is nothing to show it on.
[[ -t 0 && -t 1 ]] || { echo "show it with: tmux attach -t $session"; exit 0; }
[[ -z ${TMUX:-} ]] || exec tmux switch-client -t "=$session"
exec tmux attach-session -t "=$session"
