-- What no policy of Envoy Gateway does. The tables are made from clients.yaml; a client's key in them is its identity.

-- Lets the access log and limits know a value. Envoy's objects can't be kept from one chunk to the next.
local function tell(handle, field, value)
  handle:streamInfo():dynamicMetadata():set("slipway", field, value)
end

-- By the names in the ``usage`` of an answer: those in the access log, and of what limits count.
local FIELDS = {
  prompt_tokens = "prompt_tokens", input_tokens = "prompt_tokens",
  completion_tokens = "output_tokens", output_tokens = "output_tokens",
  cached_tokens = "cached_tokens", total_tokens = "tokens",
}

function envoy_on_request(handle)
  local headers = handle:headers()
  local client = headers:get(CLIENT) or ""  -- from the filter that let it in, which is before this one
  tell(handle, "client", NAMES[client] or "nobody")
  headers:replace("x-vllm-priority", PRIORITIES[client] or "0")
  headers:remove("authorization")  -- a token is for the gateway
  if SALTS[client] and headers:get(":method") == "POST" then
    local body = handle:body()
    local text = body and tostring(body:getBytes(0, body:length())):match("^(.*)}%s*$")
    if text then  -- of a field that is there twice, vLLM takes the last
      local length = body:setBytes(text .. ',"cache_salt":"' .. SALTS[client] .. '"}')
      if handle:headers():get("content-length") then
        handle:headers():replace("content-length", tostring(length))
      end
    end
  end
end

-- In parts of the currency's unit. An answer may repeat names that its client has sent, so the dearest model counts.
local function cost(models, used)
  local most = 0
  for name in pairs(next(models) and models or {[""] = true}) do
    local price = PRICES[name] or PRICES[""]
    most = math.max(most, (used.prompt_tokens or 0) * price.prompt + (used.output_tokens or 0) * price.output)
  end
  return most * PARTS / 1000000
end

-- Tells what an answer, whole or streamed, says it used. The most that it says: it may repeat what it was asked, numbers
-- of the client's own among it.
function envoy_on_response(handle)
  local models, used, rest, chance = {}, {}, "", math.random()  -- rounds up as often as the rest of a part is large
  for chunk in handle:bodyChunks() do
    local text, more = rest .. tostring(chunk:getBytes(0, chunk:length())), false
    for name in text:gmatch('"model"%s*:%s*"([^"]+)"') do
      if not next(models) then
        tell(handle, "model", name)
        tell(handle, "release", text:match('"system_fingerprint"%s*:%s*"([^"]+)"') or "")
      end
      models[name] = true
    end
    for name, number in text:gmatch('"([a-z]+_tokens)"%s*:%s*(%d+)') do
      local field, tokens = FIELDS[name], math.min(tonumber(number), 1000000000)
      if field and tokens > (used[field] or -1) then
        used[field], more = tokens, true
        tell(handle, field, tokens)
      end
    end
    if more and PRICES then
      tell(handle, "money", math.floor(cost(models, used) + chance))
    end
    rest = text:sub(-256)
  end
end
