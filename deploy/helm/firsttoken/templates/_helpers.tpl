{{- define "firsttoken.name" -}}
{{- $name := .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-firsttoken" .Release.Name) (contains "firsttoken" .Release.Name)) -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "firsttoken.selector" -}}
app.kubernetes.io/name: firsttoken
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Of every object. `component`: gateway or envoy. */}}
{{- define "firsttoken.labels" -}}
{{ include "firsttoken.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "firsttoken.gateway" -}}
{{- include "firsttoken.labels" (merge (dict "component" "gateway") .) -}}
{{- end -}}

{{- define "firsttoken.envoy" -}}
{{- include "firsttoken.labels" (merge (dict "component" "envoy") .) -}}
{{- end -}}

{{- define "firsttoken.image" -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag }}{{- end -}}
{{- end -}}

{{- define "firsttoken.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "firsttoken.name" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* The job of the release in Prometheus; rules and dashboards tell releases apart by it. */}}
{{- define "firsttoken.job" -}}
firsttoken-{{ .Release.Namespace }}-{{ .Release.Name }}
{{- end -}}

{{/* The admin port listens beyond the pod's loopback only where somebody is to read it. */}}
{{- define "firsttoken.isAdminOpen" -}}
{{- if or .Values.monitoring.serviceMonitor.enabled .Values.networkPolicy.admin -}}true{{- end -}}
{{- end -}}

{{/* Fails for a secret, given with its name, that is no variable of the environment. Spared: `Bearer ${NAME}`. */}}
{{- define "firsttoken.reference" -}}
{{- if not (regexMatch "^([A-Za-z]+ )?\\$\\{[A-Za-z_][A-Za-z0-9_]*\\}$" (toString (last .))) -}}
{{- fail (printf "%s holds a secret: write ${NAME}, and env.NAME: {secret: SECRET, key: KEY}" (first .)) -}}
{{- end -}}
{{- end -}}

{{/* The configuration: the values, and what the chart sets. Callers reach the data port of a picker's pod by loopback alone. */}}
{{- define "firsttoken.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $drain := dict "wait" (printf "%ds" (int .Values.drain.wait)) "grace" (printf "%ds" (int .Values.drain.grace)) -}}
{{- $host := ternary "0.0.0.0" "127.0.0.1" (eq .Values.mode "serve") -}}
{{- $server := dict "listen" (printf "%s:8080" $host) "admin" (printf "%s:9090" (ternary "0.0.0.0" "127.0.0.1" (eq (include "firsttoken.isAdminOpen" .) "true"))) "drain" $drain -}}
{{- if .Values.tls.secret -}}
{{- $_ := set $server "tls" (dict "certificate" "/etc/firsttoken-tls/tls.crt" "key" "/etc/firsttoken-tls/tls.key") -}}
{{- end -}}
{{- $state := ternary (dict "redis" "${REDIS_URL}") (dict "dir" "/var/lib/firsttoken") (ne .Values.redis.secret "") -}}
{{- $owned := dict "server" $server "state" $state -}}
{{- if eq .Values.mode "pick" -}}
{{- $_ := set $owned "pick" (dict "listen" "0.0.0.0:9002") -}}
{{- end -}}
{{- toYaml (mergeOverwrite $config $owned) -}}
{{- end -}}

{{/* Sections of the configuration that a running gateway does not change. */}}
{{- define "firsttoken.fixed" -}}
{{- toJson (pick (include "firsttoken.config" . | fromYaml) "server" "state" "telemetry" "records" "pick") -}}
{{- end -}}

{{/* Namespaces that the gateway reads, as JSON: by namespace, whether an InferencePool is among what it reads there. */}}
{{- define "firsttoken.namespaces" -}}
{{- $found := dict -}}
{{- range .Values.config.pools -}}
{{- $endpoints := .endpoints | default list -}}
{{- range (ternary (list $endpoints) $endpoints (kindIs "map" $endpoints)) -}}
{{- if and (kindIs "map" .) .kubernetes -}}
{{- $isPool := hasKey .kubernetes "inference_pool" -}}
{{- $namespace := first (splitList "/" (ternary .kubernetes.inference_pool .kubernetes.service $isPool)) -}}
{{- $_ := set $found $namespace (or $isPool (get $found $namespace | default false)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- define "firsttoken.env" -}}
{{- if or .Values.env .Values.redis.secret }}
env:
  {{- if .Values.redis.secret }}
  - name: REDIS_URL
    valueFrom: {secretKeyRef: {name: {{ .Values.redis.secret }}, key: {{ .Values.redis.key }}}}
  {{- end }}
  {{- range $name, $from := .Values.env }}
  - name: {{ $name }}
    {{- if $from.secret }}
    valueFrom: {secretKeyRef: {name: {{ $from.secret }}, key: {{ $from.key | quote }}}}
    {{- else }}
    value: {{ $from.value | quote }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* What both containers mount. */}}
{{- define "firsttoken.mounts" -}}
- {name: config, mountPath: /etc/firsttoken, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.secret }}
- {name: tls, mountPath: /etc/firsttoken-tls, readOnly: true}
{{- end }}
{{- with .Values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "firsttoken.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "firsttoken.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Over nodes, then zones, by the pods of one revision. */}}
{{- define "firsttoken.spread" -}}
{{- $selector := include "firsttoken.selector" . | fromYaml -}}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector: {matchLabels: {{ toJson $selector }}}
  matchLabelKeys: [pod-template-hash]
{{- end }}
{{- end -}}

{{/* An ingress rule of a NetworkPolicy; none for no peers: an empty `from` would be everybody. */}}
{{- define "firsttoken.ingress" -}}
{{- if .peers }}
- from: {{ toJson .peers }}
  ports: [{protocol: TCP, port: {{ .port }}}]
{{- end }}
{{- end -}}
