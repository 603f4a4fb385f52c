{{- define "pdgate.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{/* (dict "root" $ "component" "gateway") */}}
{{- define "pdgate.selector" -}}
app.kubernetes.io/name: pdgate
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "pdgate.labels" -}}
{{ include "pdgate.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* What one worker pool adds to the labels of its pods. */}}
{{- define "pdgate.workerLabels" -}}
pdgate.dev/workers: {{ .name }}
pdgate.dev/pool: {{ .pool }}
pdgate.dev/role: {{ .role }}
{{- with .zone }}
pdgate.dev/zone: {{ . }}
{{- end }}
pdgate.dev/spot: {{ .spot | quote }}
{{- if .managed }}
pdgate.dev/template: "true"
{{- end }}
{{- end }}

{{/* What pdgate's fleet reads on a template. */}}
{{- define "pdgate.workerNotes" -}}
{{- if .managed }}
annotations:
  pdgate.dev/max-workers: {{ .maxWorkers | quote }}
  pdgate.dev/per-hour-nano: {{ int64 .perHourNano | quote }}
{{- end }}
{{- end }}

{{/* A worker pool over its defaults, as JSON. (dict "root" $ "pool" entry) */}}
{{- define "pdgate.worker" -}}
{{- mergeOverwrite (deepCopy .root.Values.workerDefaults) .pool | toJson -}}
{{- end }}

{{- define "pdgate.image" -}}
{{ printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) }}
{{- end }}
