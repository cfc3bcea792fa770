-- Health of a GymRestore for Argo CD.
local status = obj.status
if status == nil or status.observedGeneration == nil or status.observedGeneration < 0 then
  return { status = "Progressing", message = "the operator has not looked at it yet" }
end
if obj.metadata.deletionTimestamp ~= nil then
  return { status = "Progressing", message = "it is being deleted" }
end
for _, condition in ipairs(status.conditions or {}) do
  if condition.type == "Succeeded" and condition.status == "True" then
    return { status = "Healthy", message = condition.message }
  end
  if condition.type == "Succeeded" and condition.status == "False" then
    return { status = "Degraded", message = condition.message }
  end
end
return { status = "Progressing", message = status.message or "it waits for its turn" }
