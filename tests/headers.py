"""Headers of safetensors files, whole and broken, with what is to be said of them. Data for test_safetensors.py."""

import json


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def header(*entries, **named):
    return json.dumps(dict([*entries, *named.items()])).encode()


ONE = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


def in_one(old, new):
    assert old in ONE
    return ONE.replace(old, new)


# name -> (header bytes, data bytes, text of the error). The reference refuses each of them too.
BROKEN = {
    "overlap by one byte": (header(a=entry(), b=entry("U8", [2], [7, 9])), 9, "overlap.*'a' .0, 8.*'b' .7, 9"),
    "exact alias": (header(a=entry(), b=entry()), 8, "overlap.*'a'.*'b'"),
    "hole between tensors": (header(a=entry(), b=entry(offsets=[16, 24])), 24, "8 bytes belong to no tensor.*'a'.*'b'"),
    "hole before the first": (header(a=entry(offsets=[8, 16])), 16, "8 bytes belong to no tensor.*start of the data"),
    "empty tensor inside another": (header(z=entry(shape=[0], offsets=[4, 4]), a=entry()), 8, "overlap"),
    "trailing bytes": (ONE, 24, "16 bytes after the last tensor"),
    "one byte short": (ONE, 7, "70 bytes needed, 69 present.*1 missing.*'a'"),
    "data missing altogether": (ONE, 0, "truncated"),
    "ends before it begins": (header(a=entry(offsets=[8, 0])), 8, "overlap|before it begins|no tensor"),
    "negative offset": (in_one(b"[0,8]", b"[-8,0]"), 8, "'a'.*data_offsets is .-8, 0"),
    "offset minus zero": (in_one(b"[0,8]", b"[-0,8]"), 8, "'a'.*data_offsets"),
    "float offset": (in_one(b"[0,8]", b"[0,8.0]"), 8, "'a'.*data_offsets is .0, 8.0"),
    "float shape": (in_one(b"[2]", b"[2.0]"), 8, "'a'.*shape is .2.0"),
    "offset with exponent": (in_one(b"[0,8]", b"[0,8e0]"), 8, "'a'.*data_offsets"),
    "boolean offset": (in_one(b"[0,8]", b"[false,8]"), 8, "'a'.*data_offsets is .false, 8"),
    "boolean shape": (b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', 1, "'a'.*shape is .true"),
    "string offset": (in_one(b"[0,8]", b'["0","8"]'), 8, "'a'.*data_offsets"),
    "null shape": (in_one(b"[2]", b"null"), 8, "'a'.*shape is null"),
    "null in shape": (in_one(b"[2]", b"[null]"), 8, "'a'.*shape"),
    "nested shape": (in_one(b"[2]", b"[[2]]"), 8, "'a'.*shape"),
    "object as shape": (in_one(b"[2]", b"{}"), 8, "'a'.*shape is an object"),
    "object as offsets": (in_one(b"[0,8]", b'{"0":8,"1":9}'), 8, "'a'.*data_offsets is an object"),
    "one offset": (in_one(b"[0,8]", b"[8]"), 8, "'a'.*data_offsets has 1 numbers"),
    "three offsets": (in_one(b"[0,8]", b"[0,8,8]"), 8, "'a'.*data_offsets has 3 numbers"),
    "offset above 64 bits": (in_one(b"[0,8]", b"[0,18446744073709551616]"), 8, "'a'.*data_offsets"),
    "offset of 64 bits": (in_one(b"[0,8]", b"[0,18446744073709551615]"), 8, "'a'.*8 bytes.*18446744073709551615"),
    "shape does not fill the offsets": (in_one(b"[2]", b"[3]"), 8, "'a' is F32 .3. = 12 bytes.*give it 8"),
    "shape [1] over no bytes": (header(a=entry(shape=[1], offsets=[0, 0])), 0, "'a' is F32 .1. = 4 bytes.*give it 0"),
    "shape overflows": (in_one(b"[2]", b"[4294967296,4294967296,4294967296]"), 8, "'a'.*overflows"),
    "shape overflows before its zero": (header(a=entry(shape=[2**63, 4, 0], offsets=[0, 0])), 0, "'a'.*overflows"),
    "size in bits overflows": (header(a=entry(shape=[2**60], offsets=[0, 8])), 8, "'a'.*overflows"),
    "shape above 64 bits": (in_one(b"[2]", b"[18446744073709551616]"), 8, "'a'.*shape"),
    "negative shape": (in_one(b"[2]", b"[-2]"), 8, "'a'.*shape"),
    "odd packed size": (header(a=entry("F4", [1, 3], [0, 2])), 2, "'a'.*F4 .1, 3. takes 12 bits"),
    "odd packed size of 6 bits": (header(a=entry("F6_E3M2", [3], [0, 3])), 3, "'a'.*18 bits"),
    "no dtype": (in_one(b'"dtype":"F32",', b""), 8, "'a'.*no 'dtype'"),
    "no shape": (in_one(b'"shape":[2],', b""), 8, "'a'.*no 'shape'"),
    "no offsets": (in_one(b',"data_offsets":[0,8]', b""), 8, "'a'.*no 'data_offsets'"),
    "dtype is a number": (in_one(b'"F32"', b"32"), 8, "'a'.*dtype is 32"),
    "dtype twice": (in_one(b'"dtype"', b'"dtype":"F32","dtype"'), 8, "'a'.*duplicate key.*dtype"),
    "tensor is null": (b'{"a":null}', 0, "'a'.*null, not an object"),
    "tensor is a number": (b'{"a":1}', 0, "'a'.*not an object"),
    "tensor is a list of pairs": (
        b'{"a":[["dtype","F32"],["shape",[2]],["data_offsets",[0,8]]]}',
        8,
        "'a'.*not an obj",
    ),
    "metadata value is a number": (header(__metadata__={"a": 1}), 0, "__metadata__.*'a'.*is 1, not a string"),
    "metadata is a list": (header(__metadata__=[]), 0, "__metadata__ is"),
    "metadata looks like a tensor": (in_one(b'"a"', b'"__metadata__"'), 8, "__metadata__"),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{}}', 0, "duplicate key.*__metadata__"),
    "array at the top": (b"[]", 0, "not an object"),
    "null at the top": (b"null", 0, "not an object"),
    "no header at all": (b"", 0, "not JSON"),
    "header of spaces": (b" " * 64, 0, "not JSON"),
    "header cut": (ONE[:-1], 8, "not JSON"),
    "header ends in zeros": (ONE + b"\0\0", 8, "not JSON"),
    "garbage after the metadata": (b'{"__metadata__":{}x' + ONE[1:], 8, "not JSON"),
    "comma at the end": (ONE[:-1] + b",}", 8, "not JSON"),
    "two commas": (ONE[:-1] + b",," + header(b=entry(offsets=[8, 16]))[1:], 16, "not JSON"),
    "leading zero": (in_one(b"[0,8]", b"[0,08]"), 8, "not JSON"),
    "byte order mark": (b"\xef\xbb\xbf" + ONE, 8, "not JSON"),
    "NaN": (in_one(b"}}", b',"x":NaN}}'), 8, "NaN is not JSON"),
    "number out of range": (in_one(b"}}", b',"x":1e400}}'), 8, "out of range"),
    "integer out of range": (in_one(b"}}", b',"x":' + b"9" * 400 + b"}}"), 8, "out of range"),
    "integer of 5000 digits": (in_one(b"}}", b',"x":' + b"9" * 5000 + b"}}"), 8, "not JSON"),
    "control character in a name": (in_one(b'"a"', b'"\x01"'), 8, "not JSON"),
    "half a surrogate pair": (in_one(b'"a"', b'"\\ud800"'), 8, "surrogate"),
    "half a surrogate pair in an extra field": (in_one(b"}}", b',"x":["\\udfff"]}}'), 8, "surrogate"),
    "not UTF-8": (in_one(b'"a"', b'"\xff"'), 8, "not UTF-8 .byte 10 "),
    "nested too deeply": (in_one(b"}}", b',"x":' + b"[" * 126 + b"]" * 126 + b"}}"), 8, "nested too deeply"),
    "nested beyond any stack": (in_one(b"}}", b',"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}}"), 8, "nested too"),
}

# What both accept: name -> (header bytes, data bytes, names of the tensors).
FINE = {
    "one tensor": (ONE, 8, "a"),
    "nothing": (b"{}", 0, ""),
    "only metadata": (b'{"__metadata__":{"format":"pt"}}', 0, ""),
    "metadata is null": (b'{"__metadata__":null}', 0, ""),
    "metadata with a key twice": (b'{"__metadata__":{"a":"1","a":"2"}}', 0, ""),
    "metadata and a tensor": (b'{"__metadata__":{"f":"p\\ud83d\\ude00"},' + ONE[1:], 8, "a"),
    "metadata after a tensor": (ONE[:-1] + b',"__metadata__":{"f":"pt"}}', 8, "a"),
    "header order is not offset order": (header(b=entry(offsets=[8, 16]), a=entry()), 16, "ba"),
    "spaces behind": (ONE + b" \n\r\t", 8, "a"),
    "spaces before": (b" \n" + ONE, 8, "a"),
    "spaces everywhere": (in_one(b":", b" : "), 8, "a"),
    "other order of fields": (b'{"a":{"data_offsets":[0,8],"shape":[2],"dtype":"F32"}}', 8, "a"),
    "extra fields": (in_one(b"}}", b',"x":{"y":[1.5,null,true,-3,-0]},"x":2,"z":' + b"9" * 30 + b"}}"), 8, "a"),
    "nested as deeply as the reference goes": (in_one(b"}}", b',"x":' + b"[" * 125 + b"]" * 125 + b"}}"), 8, "a"),
    "empty tensors at either end": (
        header(a=entry(shape=[0], offsets=[0, 0]), b=entry(), c=entry("F8_E4M3", [0, 64], [8, 8])),
        8,
        "abc",
    ),
    "empty and scalar shapes": (header(a=entry(shape=[], offsets=[0, 4]), b=entry("U8", [1, 0], [4, 4])), 4, "ab"),
    "zero before an overflow": (header(a=entry(shape=[0, 2**63, 4], offsets=[0, 0])), 0, "a"),
    "packed by four bits": (header(a=entry("F4", [2, 8], [0, 8])), 8, "a"),
    "packed rows that end inside a byte": (header(a=entry("F4", [2, 3], [0, 3])), 3, "a"),
    "packed by six bits": (header(a=entry("F6_E2M3", [4], [0, 3])), 3, "a"),
    "an empty name": (in_one(b'"a"', b'""'), 8, [""]),
    "escapes in a name": (in_one(b'"a"', b'"\\u0000\\"\\\\\\ud83d\\ude00"'), 8, ['\0"\\\N{GRINNING FACE}']),
    "a name like a number or a keyword": (in_one(b'"a"', b'"-0 true -1 \xc3\xa9"'), 8, ["-0 true -1 é"]),
}

# Where the two differ on purpose, with ours first: see the module's docstring.
DIFFERENT = {
    "a key twice with one meaning": (ONE[:-1] + b"," + ONE[1:], 8, "duplicate key: 'a' appears 2 times"),
    "a tensor as an array": (b'{"a":["F32",[2],[0,8]]}', 8, "'a'.*not an object"),
    "a dtype as an object": (in_one(b'"F32"', b'{"F32":null}'), 8, "'a'.*dtype is an object"),
}
