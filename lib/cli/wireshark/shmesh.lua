-- What `shmesh capture` records, for Wireshark: put this file into its folder of personal Lua plugins (Help, About, Folders).
-- Filters: shmesh.msg_id == 0x80, shmesh.cell_id == 0, shmesh.from == 1, shmesh.no_data.

local shmesh = Proto("shmesh", "shmesh link")

local sides = { [0] = "primary", [1] = "secondary" }
local pools = { [0] = "none", [1] = "cpu_data", [2] = "cpu_large", [3] = "cuda_data", [4] = "gpu_data" }

local f = {
  form = ProtoField.uint8("shmesh.form", "Form"),
  from = ProtoField.uint8("shmesh.from", "From", base.DEC, sides),
  inline = ProtoField.bool("shmesh.inline", "In the ring", 8, nil, 0x01),
  no_data = ProtoField.bool("shmesh.no_data", "DATA was not copied in time", 8, nil, 0x02),
  pool = ProtoField.uint8("shmesh.data_pool", "Pool of DATA", base.DEC, pools),
  msg_id = ProtoField.int32("shmesh.msg_id", "Message id"),
  cell_id = ProtoField.int32("shmesh.cell_id", "Cell id"),
  msg_len = ProtoField.uint32("shmesh.msg_len", "Bytes of MSG"),
  data_len = ProtoField.uint32("shmesh.data_len", "Bytes of DATA"),
  position = ProtoField.uint64("shmesh.position", "Place in the stream"),
  msg = ProtoField.bytes("shmesh.msg", "MSG"),
  data = ProtoField.bytes("shmesh.data", "DATA"),
}
shmesh.fields = { f.form, f.from, f.inline, f.no_data, f.pool, f.msg_id, f.cell_id, f.msg_len, f.data_len, f.position, f.msg, f.data }

local HEADER = 32

function shmesh.dissector(buffer, pinfo, tree)
  if buffer:len() < HEADER or buffer(0, 1):uint() ~= 1 then
    return 0
  end
  local from = buffer(1, 1):uint()
  -- As it is without a sign: Lua 5.2 formats no negative number in hexadecimal.
  local msg_id, cell_id = buffer(4, 4):le_uint(), buffer(8, 4):le_int()
  local msg_len, data_len = buffer(12, 4):le_uint(), buffer(16, 4):le_uint()
  pinfo.cols.protocol = "shmesh"
  pinfo.cols.src = sides[from] or "?"
  pinfo.cols.dst = sides[1 - from] or "?"
  pinfo.cols.info = string.format("msg 0x%02x cell %d: %d + %d bytes", msg_id, cell_id, msg_len, data_len)

  local part = tree:add(shmesh, buffer(0, HEADER), string.format("shmesh, message 0x%02x", msg_id))
  part:add(f.form, buffer(0, 1))
  part:add(f.from, buffer(1, 1))
  part:add(f.inline, buffer(2, 1))
  part:add(f.no_data, buffer(2, 1))
  part:add(f.pool, buffer(3, 1))
  part:add_le(f.msg_id, buffer(4, 4))
  part:add_le(f.cell_id, buffer(8, 4))
  part:add_le(f.msg_len, buffer(12, 4))
  part:add_le(f.data_len, buffer(16, 4))
  part:add_le(f.position, buffer(24, 8))

  -- What was captured may be shorter than what was sent.
  local here = buffer:len() - HEADER
  local msg_here = math.min(buffer(20, 4):le_uint(), here)
  if msg_here > 0 then
    part:add(f.msg, buffer(HEADER, msg_here))
  end
  if here > msg_here then
    part:add(f.data, buffer(HEADER + msg_here, here - msg_here))
  end
  return buffer:len()
end

DissectorTable.get("wtap_encap"):add(wtap_encaps.USER0, shmesh)
