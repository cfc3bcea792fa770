-- Health of a GymStack for Argo CD.
local status = obj.status
if status == nil or status.observedGeneration == nil or status.observedGeneration < 0 then
  return { status = "Progressing", message = "the operator has not looked at it yet" }
end
if obj.metadata.generation ~= nil and status.observedGeneration < obj.metadata.generation then
  return { status = "Progressing", message = "the operator has not seen the last change yet" }
end
if obj.metadata.deletionTimestamp ~= nil then
  return { status = "Progressing", message = "it is being deleted" }
end
local found = {}
for _, condition in ipairs(status.conditions or {}) do
  found[condition.type] = condition
end
local function holds(name, value)
  return found[name] ~= nil and found[name].status == value
end
if holds("Stalled", "True") then
  return { status = "Degraded", message = found["Stalled"].message }
end
if obj.spec.suspend then
  return { status = "Suspended", message = "spec.suspend is set" }
end
if status.stoppedBy ~= nil then
  return { status = "Suspended", message = "checkpoint " .. status.stoppedBy .. " stopped it" }
end
if holds("StorageReady", "False") then
  return { status = "Degraded", message = found["StorageReady"].message }
end
if holds("Ready", "True") then
  return { status = "Healthy", message = found["Ready"].message }
end
if found["Ready"] ~= nil then
  return { status = "Progressing", message = found["Ready"].message }
end
return { status = "Progressing", message = "nothing is known of its servers yet" }
