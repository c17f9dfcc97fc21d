"""The POSIX shell that runs inside a container without Python: its init, and what goes around each command. Used by
`plain`.

Invariants: the init never forks once it serves, so that a sandbox full of processes can still be cleared; a command's
end is said after all of its output, by a mark that nobody can print by accident.
"""

from __future__ import annotations

STATE = "/run/agentrl"
"""A small tmpfs: `c.MARKER` of each running command (pid of its supervisor, deadline, birth, stage), `lease`, `ticker`.
Times are hundredths of seconds since boot, since that is what a shell can read without a program."""

COMMON = f"""
d={STATE}
now() {{ read -r u _ </proc/uptime; now=${{u%.*}}${{u#*.}}; }}
birth() {{ shift 19; born=$1; }}
"""

# A USR1 only ends its reading, so that one amid a sweep starts none inside it; whoever sends one repeats it.
# A process belongs to a command below its supervisor, or as an orphan with its marker, or as one without any marker
# that was born later, when no other command runs. Only orphans are asked, since reading bytewise is slow.
INIT = (
    COMMON
    + r"""
ttl=$1 grace=500
belongs() { # PID SUPERVISOR MARKER BORN: is this orphan of the command?
  while read -r line || [ -n "$line" ]; do
    case $line in *AGENTRL_COMMAND=$3*) return 0;; *AGENTRL_COMMAND=*) return 1;; esac
  done </proc/$1/environ
  for other in "$d"/c.*; do [ "$other" = "$d/c.$3" ] || [ ! -s "$other" ] || return 1; done
  read -r line </proc/$1/stat
  birth ${line##*)}
  [ "${born:-0}" -ge "$4" ]
}
victims() { # the same arguments but the first: sets V to all that live, the supervisor left out
  V= S=" $1 " more=1
  while [ "$more" = 1 ]; do
    more=0
    for q in /proc/[0-9]*; do
      q=${q#/proc/} state= parent=
      [ "$q" != 1 ] || continue
      case $S in *" $q "*) continue;; esac
      while read -r k v _; do
        case $k in State:) state=$v;; PPid:) parent=$v; break;; esac
      done </proc/$q/status
      case $state in ''|Z|X) continue;; esac
      case $S in *" $parent "*) ;; *) [ "$parent" = 1 ] && [ "$q" != "$ticker" ] && belongs "$q" "$@" || continue;; esac
      V="$V $q" S="$S$q " more=1
    done
  done
}
slay() { # stop until nobody new appears, then kill, until three looks in a row see nobody
  stopped=' ' looks=0; now; until=$((now + 500))
  read -r ticker <"$d/ticker"
  while [ $looks -lt 3 ] && [ "$now" -lt $until ]; do
    victims "$@"; now
    if [ -z "$V" ]; then looks=$((looks + 1)); continue; fi
    looks=0 fresh=
    for p in $V; do case $stopped in *" $p "*) ;; *) fresh="$fresh $p";; esac; done
    if [ -n "$fresh" ]; then kill -STOP $fresh; stopped="$stopped${fresh# } "; else kill -KILL $V; fi
  done
}
sweep() {
  now; busy=
  for f in "$d"/c.*; do
    [ -s "$f" ] || continue
    pid= stage=
    read -r pid limit began stage <"$f"
    [ -n "$stage" ] || continue
    if [ "$stage" = over ]; then
      if [ -d "/proc/$pid" ]; then kill -USR2 "$pid"; else true >"$f"; fi
      continue
    fi
    busy=1
    if [ "$stage" = run ] && [ -d "/proc/$pid" ]; then
      [ "$now" -ge "$limit" ] || continue
      echo "$pid $((limit + 200)) $began term" >"$f"
      kill -TERM "-$pid"
    elif [ "$stage" != term ] || [ "$now" -ge "$limit" ] || [ ! -d "/proc/$pid" ]; then
      slay "$pid" "${f##*/c.}" "$began"
      echo "$pid 0 0 over" >"$f"
      kill -USR2 "$pid"
    fi
  done
  read -r lease <"$d/lease"
  [ -n "$busy" ] || [ "$now" -lt $((lease + grace)) ] || exit 3
}
now; echo $((now + ttl)) >"$d/lease" || exit 70
(while sleep 5; do kill -USR1 1; done) </dev/null >/dev/null 2>&1 &
echo $! >"$d/ticker"
exec 9<>/proc/self/fd/0 </dev/null >/dev/null 2>&1
trap '' CHLD HUP INT TERM
trap : USR1
while :; do read -r line <&9; sweep; done
"""
)

# Waiting for the init, it forks nothing, which the init would take for the command's.
# The shell says on its own stderr when a signal ended what it waited for, which tells exit 137 from a KILL; it says
# nothing of INT and PIPE, so 130 and 141 count as those.
RUN = (
    COMMON
    + r"""
n=$1 m=$2 limit=$3 ttl=$4 dir=$5; shift 5
f=$d/c.$m
exec 4>&2 2>/dev/null
trap : HUP INT QUIT TERM USR1 USR2 PIPE ALRM
lease() { now; l=0; read -r l <"$d/lease"; [ $((now + ttl)) -le "$l" ] || echo $((now + ttl)) >"$d/lease"; }
ooms() {
  oom=0
  for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    [ -r $file ] && while read -r k v; do [ "$k" != oom_kill ] || oom=$v; done <$file
  done
}
read -r line </proc/$$/stat; birth ${line##*)}
lease
read -r t <"$d/ticker"
[ -d "/proc/$t" ] || { (while sleep 5; do kill -USR1 1; done) </dev/null >/dev/null 4>&- & echo $! >"$d/ticker"; }
echo "$$ $((now + limit)) $born run" >"$f"
printf '%sB\n' "$n" >&4
ooms; before=$oom
[ -z "$BASH_VERSION" ] || shopt -s execfail
if cd -- "$dir" 2>&4; then
  exec 2>"$d/e.$m"
  (trap ': >"$d/f.$m"' EXIT; echo 500 >/proc/self/oom_score_adj; exec "$@" 2>&4 4>&-; exit 126)
  code=$?
  exec 2>/dev/null
else
  : >"$d/f.$m"; code=126
fi
word= late=0 kind=E
read -r word <"$d/e.$m"
case $code in 130|141) kind=S;; *) [ -z "$word" ] || [ $code -le 128 ] || kind=S;; esac
[ ! -e "$d/f.$m" ] || kind=F
read -r _ end _ stage <"$f"
if [ "$stage" != run ]; then
  late=1
  echo "$$ ${end:-0} $born done" >"$f"
  exec 9<>/proc/1/fd/9
  while [ "$stage" != over ]; do kill -USR1 1; read -r line <&9; read -r _ _ _ stage <"$f"; done
fi
ooms; lease
rm -f "$d/e.$m" "$d/f.$m" "$f"
printf '%sE\n' "$n"
printf '%sE %s %s %s %s\n' "$n" $kind $code $late $((oom - before)) >&4
"""
)

RENEW = COMMON + 'now; echo $((now + $1)) >"$d/lease"'

# Where a path leads, symlinks followed, also of what is not there yet. Relative ones ($3 = 1) stay below the workdir.
REAL = r"""
fail() { echo "$2" >&2; exit "$1"; }
real() {
  r=$1 rest= link=
  while [ ! -e "$r" ] && [ ! -h "$r" ]; do rest=/${r##*/}$rest r=${r%/*}; [ -n "$r" ] || r=/; done
  q=$r; while [ -n "$q" ] && [ "$q" != / ]; do [ ! -h "$q" ] || link=1; q=${q%/*}; done
  if [ -n "$link" ]; then
    command -v readlink >/dev/null || fail 65 "a symlink, and the image has no readlink to follow it"
    r=$(readlink -f -- "$r"; echo x); r=${r%x}; r=${r%?}
    [ -n "$r" ] || fail 66 "No such file or directory"
  fi
  r=${r%/}$rest; [ -n "$r" ] || r=/
}
base=$1 path=$2
if [ "$3" = 1 ]; then real "$base"; base=$r; fi
real "$path"
if [ "$3" = 1 ]; then case $r/ in "${base%/}"/*) ;; *) fail 67 "leads out of $1";; esac; fi
shift 3
"""
READ = (
    REAL
    + r"""
[ -e "$r" ] || fail 66 "No such file or directory"
[ -f "$r" ] || fail 66 "not a regular file"
size=$(wc -c <"$r") || fail 66 "cannot be read"
[ "$2" -lt 0 ] && [ "$size" -gt "$3" ] && fail 68 "larger than $3 bytes: read it by ranges"
echo $size >&2
if [ "$2" -lt 0 ]; then tail -c "+$(($1 + 1))" <"$r"; else tail -c "+$(($1 + 1))" <"$r" | head -c "$2"; fi
"""
)
WRITE = (
    REAL
    + r"""
[ ! -e "$r" ] || [ -f "$r" ] || fail 66 "not a regular file"
mkdir -p -- "${r%/*}/" && cat >"$r" && chmod "$1" "$r" || exit 66
"""
)
PACK = (
    REAL
    + r"""
[ -e "$r" ] || fail 66 "No such file or directory"
command -v tar >/dev/null || fail 65 "the image has no tar"
if [ -d "$r" ]; then cd -- "$r" && tar -cf - .; else cd -- "${r%/*}/" && tar -cf - "./${r##*/}"; fi
"""
)
UNPACK = (
    REAL
    + r"""
command -v tar >/dev/null || fail 65 "the image has no tar"
mkdir -p -- "$r" && cd -- "$r" || exit 66
for folder; do [ ! -h "$folder" ] || fail 67 "the archive's member $folder leads through a symlink"; done
tar -xof -
"""
)
