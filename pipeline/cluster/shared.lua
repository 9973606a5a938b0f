-- At the address of all models a client sees only those that it may use. MODELS, made from clients.yaml, has the clients
-- that may not use all; each model of the list says in ``owned_by`` whose it is: an adapter that of its model.

local NOT_FOUND = '{"error": {"message": "the model does not exist at this address, or the client may not use it; '
  .. 'GET /v1/models lists those that it may", "type": "invalid_request_error", "param": "model", '
  .. '"code": "model_not_found"}}'

local function answer(handle, text)
  local length = handle:body(true):setBytes(text)
  handle:headers():replace("content-type", "application/json")
  handle:headers():replace("content-length", tostring(length))
end

function envoy_on_request(handle)
  local headers, told = handle:headers(), handle:streamInfo():dynamicMetadata()
  local path = headers:get(":path") or ""
  told:set("slipway", "client", headers:get(CLIENT) or "")  -- from the filter that let it in, which is before this one
  told:set("slipway", "lists", path == "/v1/models" or path:sub(1, 11) == "/v1/models?")
end

function envoy_on_response(handle)
  local told, status = handle:streamInfo():dynamicMetadata():get("slipway"), handle:headers():get(":status")
  local own = told and MODELS[told["client"]]
  if own and status == "403" then
    handle:headers():replace(":status", "404")
    answer(handle, NOT_FOUND)
  elseif own and told["lists"] and status == "200" then
    local body, kept = handle:body(true), {}
    local text = tostring(body:getBytes(0, body:length()))
    for model in (text:match('"data"%s*:%s*%[(.*)%]') or ""):gmatch("%b{}") do
      if own[model:match('"owned_by"%s*:%s*"([^"]*)"') or ""] then
        table.insert(kept, model)
      end
    end
    answer(handle, '{"object": "list", "data": [' .. table.concat(kept, ", ") .. "]}")
  end
end
