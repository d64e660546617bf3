-- push: how a script pushes the message of a call, and records its reply.
--
-- Expects  stored, and the arguments of publish by name
-- Defines  push, put_receipt
local function push(outcome)
  local pushed = redis.pcall("LPUSH", queue, head .. now .. middle .. outcome .. tail)
  if type(pushed) == "table" then return redis.error_reply("QUEUE " .. pushed.err) end
  return nil
end
local function put_receipt(reply)
  redis.call("PSETEX", receipt, receipt_for, type(reply) == "table" and cjson.encode(reply) or reply)
end
