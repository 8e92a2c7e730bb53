"""A SuperNode that sends a reply of its own to each train message; takes Keel's options.

    HOSTILE_SUPERNODE=MIB,MIB,...:OBJECT_MIB python tests/hostile_supernode.py ...

The first reply has the first number of MiB, and so on, in arrays of OBJECT_MIB MiB each. They are
sent by 8 threads, which go on after refusals.
"""

import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import flwr.supernode.start_client_internal as client_loop
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from flower_adapter import assign_message_id, supernode

sizes, object_mib = os.environ["HOSTILE_SUPERNODE"].split(":")
sizes_mib, object_mib = list(map(int, sizes.split(","))), int(object_mib)
honest = client_loop._push_messages


def push(state, object_store, send, push_object):
    """In place of the SuperNode's."""
    while not (replies := state.get_messages(is_reply=True)):
        client_loop.time.sleep(0.2)
    [reply] = replies
    about = reply.metadata
    if about.message_type != "train":
        state.msg_store[about.message_id].is_retrieved = False
        honest(state, object_store, send, push_object)
        return
    total_mib = sizes_mib.pop(0)
    draw = np.random.default_rng(0)
    arrays = [Array(draw.random(object_mib * 2**17)) for _ in range(total_mib // object_mib)]
    content = RecordDict({"arrays": ArrayRecord({str(i): a for i, a in enumerate(arrays)})})
    own = Message(content=content, metadata=about)
    assign_message_id(own, own.object_id)
    print(f"sending {total_mib} MiB at {time.time()}", flush=True)
    objects = get_all_nested_objects(own)
    missing, session = send(remove_content_from_message(own), get_object_tree(own), 1.0)

    def is_accepted(name):
        try:
            push_object(about.run_id, session, name, objects[name].deflate())
        except Exception as error:
            return type(error).__name__
        return "accepted"

    with ThreadPoolExecutor(8) as pool:
        answers = Counter(pool.map(is_accepted, [name for name in objects if name in missing]))
    print(f"{len(objects)} objects: {dict(answers)}", flush=True)
    state.delete_messages(message_ids=[about.message_id, about.reply_to_message_id])


client_loop._push_messages = push
supernode.main()
