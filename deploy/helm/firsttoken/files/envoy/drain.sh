# preStop of Envoy: no new connections, and an end when no request is active, or after the time that is given.
#   drain.sh WAIT GRACE    (s) WAIT: until balancers have noticed
admin() {
  exec 3<>"/dev/tcp/127.0.0.1/${ADMIN_PORT:-9901}" || return
  printf '%s %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n' "$1" "$2" >&3
  mapfile -t reply <&3
  exec 3>&-
}

admin POST /healthcheck/fail # not ready; answers say connection: close
sleep "$1"
for ((second = 0; second < $2; second++)); do
  admin GET '/stats?filter=^http.callers.downstream_rq_active$' || exit 0
  [[ ${reply[*]} == *'downstream_rq_active: 0'* ]] && exit 0
  sleep 1
done
