"""Headers that participants add to the wire. All are optional: a foreign peer that sends none still works."""

ACTIVATION = "x-ng-agent-activation"  # 1-based index of an agent's activation; makes it idempotent
MODEL_CALL = "x-ng-model-call"  # position of a model call in its episode, "<activation>.<n>"
TOOL_CALL = "x-ng-tool-call"  # id of a tool call; a repeat is answered, not run again
RESTART = "x-ng-checkpoint-restart"  # on a seed's reply: the episode cannot be continued
VERIFY = "x-ng-checkpoint-verify"  # on a seed's reply: "replay" where verify may simply run again
CLOSE_FOLLOWS = "x-ng-checkpoint-close-follows"  # on a verify: keep the session, a close comes
ENGINE_ATTEMPT = (
    "x-ng-engine-attempt"  # to an engine: "<folder of the cell>;<attempt>", so that older ones can be told
)
TICKET = "x-ng-generation-ticket"  # to an engine: names one stream of tokens, for cuts beside the engine
