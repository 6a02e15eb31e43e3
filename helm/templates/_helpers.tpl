{{- define "shmesh.labels" -}}
app.kubernetes.io/name: shmesh
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* What is selected by: never changes. */}}
{{- define "shmesh.selector" -}}
app.kubernetes.io/name: shmesh
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The name of all objects: `shmesh`, or the name of the release if that is more specific. */}}
{{- define "shmesh.name" -}}
{{- if eq .Release.Name "shmesh" }}shmesh{{ else }}{{ printf "%s-shmesh" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "shmesh.image" -}}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "shmesh.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* What Pod Security restricted wants of a container. */}}
{{- define "shmesh.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "shmesh.domain" -}}
{{ .Values.config.domain | default "shmesh.io" }}
{{- end }}

{{- define "shmesh.agentDirectory" -}}
{{ dig "identity" "directory" "/run/shmesh/agent" .Values.config }}
{{- end }}

{{/* The API server, before and behind its Service, and the name of that. */}}
{{- define "shmesh.toApiServer" -}}
- ports:
    {{- range .Values.networkPolicy.apiServerPorts }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}

{{/* Whether the DRA driver serves the kubelet, and not the device plugin. */}}
{{- define "shmesh.isDra" -}}
{{ if eq (.Values.config.mode | default "devicePlugin") "dra" }}true{{ end }}
{{- end }}

{{/* The resource of the identity service; none where none is advertised. */}}
{{- define "shmesh.agentResource" -}}
{{ if and (ne (dig "identity" "attachments" 256 .Values.config | int) 0) (not (include "shmesh.isDra" .)) }}agent{{ end }}
{{- end }}

{{/* The groups of claims: the first, and the number of them. */}}
{{- define "shmesh.firstGid" -}}{{ dig "dra" "gids" "first" 61000 .Values.config | int }}{{- end }}
{{- define "shmesh.gidCount" -}}{{ dig "dra" "gids" "count" 256 .Values.config | int }}{{- end }}

{{/* The plugin's configuration: the user's values, and values that follow from this pod. */}}
{{- define "shmesh.pluginConfig" -}}
{{- $ours := dict "hostRoot" "/host" "identity" (dict "enabled" false) -}}
{{- mustMergeOverwrite (deepCopy .Values.config) $ours | toYaml }}
{{- end }}

{{/* The injector's: domain, pools and units are the plugin's. */}}
{{- define "shmesh.injectorConfig" -}}
{{- $sidecar := omit .Values.sidecar "image" -}}
{{- $_ := set $sidecar "image" (include "shmesh.image" (dict "root" . "name" .Values.sidecar.image)) -}}
{{- $_ := set $sidecar "adminAddress" .Values.listenAddress -}}
{{- $_ := set $sidecar "imagePullPolicy" .Values.image.pullPolicy -}}
{{- $bridge := pick .Values.bridge "cluster" "cpu" "memory" "peers" "adminPort" "log" -}}
{{- $_ := set $bridge "image" (include "shmesh.image" (dict "root" . "name" .Values.bridge.image)) -}}
{{- $_ := set $bridge "imagePullPolicy" .Values.image.pullPolicy -}}
{{- $namespaces := list -}}
{{- if .Values.bridge.enabled }}{{- range .Values.bridge.namespaces }}{{- $namespaces = append $namespaces (pick . "name" "links") }}{{- end }}{{- end -}}
{{- $_ := set $bridge "namespaces" $namespaces -}}
{{- $config := dict
  "domain" (include "shmesh.domain" .)
  "pools" (.Values.config.pools | default list)
  "agentResource" (include "shmesh.agentResource" .)
  "shm" (dict "unit" (dig "shm" "unit" "64Mi" .Values.config))
  "sidecar" $sidecar
  "bridge" $bridge
  "limits" .Values.injector.limits
  "allowHostPid" .Values.injector.allowHostPid -}}
{{ toYaml $config }}
{{- end }}

{{/* Namespaces with injection. The namespace of the release has it too: the tests of the chart run there. */}}
{{- define "shmesh.namespaceSelector" -}}
matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: NotIn
    values:
      - kube-system
{{- range .Values.injector.excludedNamespaces }}
      - {{ . }}
{{- end }}
{{- end }}

{{/* The webhook's command line. */}}
{{- define "shmesh.webhookArgs" -}}
{{- $name := printf "%s-injector" (include "shmesh.name" .) -}}
- webhook
- --config=/etc/shmesh/injector.yaml
- --listen={{ .Values.listenAddress }}:8443
{{- if eq .Values.injector.certificate.from "self" }}
- --namespace={{ .Release.Namespace }}
- --service={{ $name }}
- --secret={{ $name }}-tls
- --webhook-configuration={{ $name }}
{{- else }}
- --tls-cert=/etc/shmesh-tls/tls.crt
- --tls-key=/etc/shmesh-tls/tls.key
{{- end }}
{{- end }}

{{/* Bytes of the quantity `sidecar.memory`, rounded up: 16Mi, 16M, 1.5Gi, 16777216. */}}
{{- define "shmesh.bytes" -}}
{{- $text := toString . -}}
{{- if not (regexMatch `^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$` $text) -}}
{{- fail (printf "sidecar.memory: %q is not a number of bytes; write 64Mi, 64M or 67108864" $text) -}}
{{- end -}}
{{- $number := float64 (regexFind `^\+?[0-9.]+([eE][+-]?[0-9]+)?` $text) -}}
{{- $units := dict "" 1 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976
  "n" 1e-9 "u" 1e-6 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- mulf $number (index $units (regexFind "([KMGTPE]i|[numkMGTPE])$" $text)) | ceil | int64 -}}
{{- end }}
