{{- define "gym-operator.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{- define "gym-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "gym-operator.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end }}

{{/* The name label is fixed: the network policies of stacks let pods with exactly this label reach control ports. */}}
{{- define "gym-operator.selectorLabels" -}}
app.kubernetes.io/name: gym-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gym-operator.labels" -}}
{{ include "gym-operator.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "gym-operator.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* What the operator may do where stacks live. Each rule says what it is for. */}}
{{- define "gym-operator.rules" -}}
# Its own kinds. `patch` of the objects is for the finalizer and for progress in annotations.
- apiGroups: [gymops.dev]
  resources: [gymstacks, gymcheckpoints]
  verbs: [get, list, watch, patch, update]
- apiGroups: [gymops.dev]
  resources: [gymstacks/status, gymcheckpoints/status]
  verbs: [get, patch, update]
# Children block the deletion of their stack, which takes the right to change the stack's finalizers.
- apiGroups: [gymops.dev]
  resources: [gymstacks/finalizers]
  verbs: [update]
# Deaths are seen on pods; a recovery deletes the pods of its cell.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
# A server taken out of a stack loses its workload and its services.
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch, update, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, create, patch, update, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, patch, update]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch, update]
# A stack's control token, made once, and the S3 credentials its storage names. No listing, no changing.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}
