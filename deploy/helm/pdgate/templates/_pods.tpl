{{/* Nobody special, nothing to write on but what is mounted, no token for the API server. */}}
{{- define "pdgate.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "pdgate.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* (list $ "GATEWAY_REDIS_URL" "redis-url") */}}
{{- define "pdgate.secretEnv" -}}
- name: {{ index . 1 }}
  valueFrom: {secretKeyRef: {name: {{ (index . 0).Values.secret }}, key: {{ index . 2 }}}}
{{- end }}

{{- define "pdgate.fieldEnv" -}}
- name: {{ index . 0 }}
  valueFrom: {fieldRef: {fieldPath: {{ index . 1 }}}}
{{- end }}

{{/* Two of a kind on two machines where that is possible. (dict "root" $ "component" "gateway") */}}
{{- define "pdgate.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector: {matchLabels: {{ include "pdgate.selector" . | fromYaml | toJson }}}
- maxSkew: 1
  topologyKey: topology.kubernetes.io/zone
  whenUnsatisfiable: ScheduleAnyway
  labelSelector: {matchLabels: {{ include "pdgate.selector" . | fromYaml | toJson }}}
{{- end }}

{{/* The pods start again when the catalogue does. */}}
{{- define "pdgate.catalogDigest" -}}
pdgate.dev/catalog: {{ .Values.catalog | default (.Files.Get "models.toml") | sha256sum }}
{{- end }}

{{- define "pdgate.catalogVolume" -}}
- name: catalog
  configMap: {name: {{ include "pdgate.name" . }}-catalog}
- name: tmp
  emptyDir: {}
{{- end }}

{{/* Metrics answer while the event loop does. */}}
{{- define "pdgate.metricsProbes" -}}
startupProbe:
  httpGet: {path: /metrics, port: metrics}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /metrics, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 3
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /metrics, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 3
{{- end }}
