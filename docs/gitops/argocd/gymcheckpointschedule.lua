-- Health of a GymCheckpointSchedule for Argo CD.
local status = obj.status
if status == nil or status.observedGeneration == nil or status.observedGeneration < 0 then
  return { status = "Progressing", message = "the operator has not looked at it yet" }
end
if obj.metadata.generation ~= nil and status.observedGeneration < obj.metadata.generation then
  return { status = "Progressing", message = "the operator has not seen the last change yet" }
end
local found = {}
for _, condition in ipairs(status.conditions or {}) do
  found[condition.type] = condition
end
if found["Stalled"] ~= nil and found["Stalled"].status == "True" then
  return { status = "Degraded", message = found["Stalled"].message }
end
if obj.spec.suspend then
  return { status = "Suspended", message = "spec.suspend is set" }
end
if found["Ready"] ~= nil and found["Ready"].status == "True" then
  return { status = "Healthy", message = found["Ready"].message }
end
if found["Ready"] ~= nil then
  return { status = "Degraded", message = found["Ready"].message }
end
return { status = "Progressing", message = "its times are being worked out" }
