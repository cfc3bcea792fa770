{{- define "gym-stack.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name -}}
{{- end }}

{{- define "gym-stack.labels" -}}
app.kubernetes.io/name: gym-stack
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "gym-stack.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* Name of the Secret with the S3 credentials: an existing one, one the chart makes, or none (a role). */}}
{{- define "gym-stack.credentialsSecret" -}}
{{- if .Values.s3.existingSecret -}}
{{- if .Values.s3.accessKeyId -}}
{{- fail "set either s3.existingSecret or s3.accessKeyId and s3.secretAccessKey, not both" -}}
{{- end -}}
{{ .Values.s3.existingSecret }}
{{- else if or .Values.s3.accessKeyId .Values.s3.secretAccessKey -}}
{{- if not (and .Values.s3.accessKeyId .Values.s3.secretAccessKey) -}}
{{- fail "s3.accessKeyId and s3.secretAccessKey belong together: set both" -}}
{{- end -}}
{{ include "gym-stack.fullname" . }}-s3
{{- end -}}
{{- end }}

{{- define "gym-stack.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "gym-stack.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{/* The servers as YAML: the given ones, or those of the demo; with the common resources where they have none. */}}
{{- define "gym-stack.servers" -}}
{{- if not (or .Values.servers .Values.demo.enabled) -}}
{{- fail "a stack needs servers: set servers (see the chart's values), or demo.enabled=true for a scripted one" -}}
{{- end -}}
{{- $given := .Values.servers | default (include "gym-stack.demoServers" . | fromYamlArray) -}}
{{- $servers := list -}}
{{- range $given -}}
{{- if or (hasKey . "resources") (not $.Values.serverResources) -}}
{{- $servers = append $servers . -}}
{{- else -}}
{{- $servers = append $servers (set (deepCopy .) "resources" $.Values.serverResources) -}}
{{- end -}}
{{- end -}}
{{ toYaml $servers }}
{{- end }}

{{- define "gym-stack.demoServers" -}}
{{- $name := include "gym-stack.fullname" . -}}
- name: env
  kind: environment
  server: single-agent-turn
- name: policy
  kind: model
  server: scripted
  config:
    base_url: http://{{ $name }}-engine:8000
- name: agent
  kind: agent
  server: simple-agent
- name: counter
  kind: resources
  server: counter
  config:
    journal: http://{{ $name }}-journal:8000
{{- end }}

{{/* The bucket alone: what follows a slash is the prefix, which the refusal writes down ready to use. */}}
{{- define "gym-stack.bucket" -}}
{{- $bucket := trimPrefix "s3://" .Values.s3.bucket -}}
{{- if or (contains "/" .Values.s3.bucket) (ne $bucket .Values.s3.bucket) -}}
{{- $parts := splitn "/" 2 $bucket -}}
{{- fail (printf "s3.bucket is the bucket's name alone: set s3.bucket=%s and s3.prefix=%s" $parts._0 (trimSuffix "/" ($parts._1 | default ""))) -}}
{{- end -}}
{{ $bucket }}
{{- end }}

{{/* How the bucket is reached, as the servers' own settings say it. */}}
{{- define "gym-stack.s3Settings" -}}
{{- $s3 := dict "bucket" (include "gym-stack.bucket" .) "region" .Values.s3.region "addressing_style" .Values.s3.addressingStyle -}}
{{- if .Values.s3.endpoint -}}
{{- $_ := set $s3 "endpoint" .Values.s3.endpoint -}}
{{- end -}}
{{ toJson $s3 }}
{{- end }}

{{/* Data address of the environment of the first cell. */}}
{{- define "gym-stack.environmentUrl" -}}
{{- range (include "gym-stack.servers" . | fromYamlArray) -}}
{{- if eq .kind "environment" -}}
http://{{ include "gym-stack.fullname" $ }}-{{ .name }}-0:8000
{{- end -}}
{{- end -}}
{{- end }}

{{- define "gym-stack.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "gym-stack.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
