{{/*
A program of the image as a Deployment and a Service of the same name, on port 8000.
Takes: root (the chart's context), name, args (list).
*/}}
{{- define "gym-stack.demoProgram" -}}
{{- $fullname := printf "%s-%s" (include "gym-stack.fullname" .root) .name }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $fullname }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "gym-stack.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
spec:
  replicas: 1
  # Two journals would keep half of the entries each.
  strategy:
    type: Recreate
  selector:
    matchLabels:
      app.kubernetes.io/instance: {{ .root.Release.Name }}
      app.kubernetes.io/component: {{ .name }}
  template:
    metadata:
      # No version here: an upgrade of the chart must not replace the pod and lose the journal.
      labels:
        app.kubernetes.io/name: gym-stack
        app.kubernetes.io/instance: {{ .root.Release.Name }}
        app.kubernetes.io/component: {{ .name }}
    spec:
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: 5
      {{- with .root.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "gym-stack.podSecurity" .root | nindent 8 }}
      containers:
        - name: {{ .name }}
          image: {{ include "gym-stack.image" .root | quote }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          command: [gym-servers, {{ .name }}]
          args:
            - --host=0.0.0.0
            - --port=8000
            {{- range .args }}
            - {{ . | quote }}
            {{- end }}
          ports:
            - name: http
              containerPort: 8000
              protocol: TCP
          readinessProbe:
            httpGet:
              path: /readyz
              port: http
            periodSeconds: 2
          {{- with .root.Values.demo.resources }}
          resources:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          securityContext:
            {{- include "gym-stack.containerSecurity" .root | nindent 12 }}
          volumeMounts:
            - name: tmp
              mountPath: /tmp
            - name: data
              mountPath: /data
      volumes:
        - name: tmp
          emptyDir: {}
        - name: data
          emptyDir: {}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $fullname }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "gym-stack.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
spec:
  selector:
    app.kubernetes.io/instance: {{ .root.Release.Name }}
    app.kubernetes.io/component: {{ .name }}
  ports:
    - name: http
      port: 8000
      targetPort: http
      protocol: TCP
{{- end }}
