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

{{/* Not the operator's name: neither its Service nor the network policies of stacks may take a test for it. */}}
{{- define "gym-operator.testLabels" -}}
app.kubernetes.io/name: gym-operator-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gym-operator.priorityClassName" -}}
{{- if .Values.priorityClass.create -}}
{{- if .Values.priorityClassName -}}
{{- fail "set either priorityClassName, for one that exists, or priorityClass.create" -}}
{{- end -}}
{{ include "gym-operator.fullname" . }}
{{- else -}}
{{ .Values.priorityClassName }}
{{- end -}}
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

{{/* What the operator may do where stacks live. Each rule says what it is for. It replaces and never patches. */}}
{{- define "gym-operator.rules" -}}
# Its own kinds: it reads specs and writes statuses.
- apiGroups: [gymops.dev]
  resources: [gymstacks, gymcheckpoints]
  verbs: [get, list, watch]
# A schedule makes checkpoints and lets go of old ones; others have a ttl. `update` is for the finalizer of those whose
# data goes with them.
- apiGroups: [gymops.dev]
  resources: [gymcheckpoints]
  verbs: [create, update, delete]
- apiGroups: [gymops.dev]
  resources: [gymcheckpointschedules, gymrestores]
  verbs: [get, list, watch]
- apiGroups: [gymops.dev]
  resources: [gymstacks/status, gymcheckpoints/status, gymcheckpointschedules/status, gymrestores/status]
  verbs: [update]
# Children block the deletion of their stack, which takes the right to change the stack's finalizers.
- apiGroups: [gymops.dev]
  resources: [gymstacks/finalizers]
  verbs: [update]
# Deaths are seen on pods; a recovery deletes the pods of its cell.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
# A server or an engine taken out of a stack loses its workload, its services and its policy.
- apiGroups: [apps]
  resources: [statefulsets, deployments]
  verbs: [get, list, create, update, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, create, update, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, update]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, create, update, delete]
# While the operator sees that nodes are drained it moves cells itself, and keeps others from evicting their pods.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, update, delete]
# A stack's control token, made once; S3 credentials and certificates that its storage names. No listing, no changing.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}

{{/* What an operator for all namespaces may do besides. */}}
{{- define "gym-operator.clusterRules" -}}
# Which kinds and namespaces exist; both may appear while the operator runs.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [namespaces]
  verbs: [list, watch]
# The UID of this one says which cluster it is: what marks a stack's data in a bucket as this cluster's.
- apiGroups: [""]
  resources: [namespaces]
  resourceNames: [kube-system]
  verbs: [get]
# Whether the node of a silent server is lost; without it, only a deletion that nobody confirms shows that.
- apiGroups: [""]
  resources: [nodes]
  verbs: [get]
{{- if .Values.nodes.watch }}
# Which nodes are cordoned: cells are moved off them.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
{{- end }}
{{- end }}
