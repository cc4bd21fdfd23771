"""The descriptors of a shop's orders, as `protoc` writes them, and the class of the orders."""

from google.protobuf import descriptor_pb2, message_factory, timestamp_pb2


def descriptors() -> descriptor_pb2.FileDescriptorSet:
    found = descriptor_pb2.FileDescriptorSet()
    timestamp_pb2.DESCRIPTOR.CopyToProto(found.file.add())
    file = found.file.add(
        name="shop.proto", package="shop", syntax="proto3", dependency=[timestamp_pb2.DESCRIPTOR.name]
    )
    field = descriptor_pb2.FieldDescriptorProto
    kind = file.enum_type.add(name="Kind")
    kind.value.add(name="PLAIN", number=0)
    kind.value.add(name="RUSH", number=1)
    line = file.message_type.add(name="Line")
    line.field.add(name="item", number=1, type=field.TYPE_STRING)
    line.field.add(name="count", number=2, type=field.TYPE_INT32)
    order = file.message_type.add(name="Order")
    for number, (name, kind) in enumerate(
        [("uuid", field.TYPE_BYTES), ("n", field.TYPE_INT64), ("text", field.TYPE_STRING), ("big", field.TYPE_UINT64)],
        1,
    ):
        order.field.add(name=name, number=number, type=kind, label=field.LABEL_OPTIONAL)
    repeated, message = field.LABEL_REPEATED, field.TYPE_MESSAGE
    order.field.add(name="lines", number=5, type=message, type_name=".shop.Line", label=repeated)
    order.field.add(name="tags", number=6, type=message, type_name=".shop.Order.TagsEntry", label=repeated)
    tags = order.nested_type.add(name="TagsEntry")
    tags.options.map_entry = True
    tags.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    tags.field.add(name="value", number=2, type=field.TYPE_INT64, label=field.LABEL_OPTIONAL)
    order.field.add(name="kind", number=7, type=field.TYPE_ENUM, type_name=".shop.Kind")
    order.field.add(name="at", number=8, type=message, type_name=".google.protobuf.Timestamp")
    order.field.add(name="late", number=9, type=field.TYPE_BOOL, proto3_optional=True, oneof_index=0)
    order.oneof_decl.add(name="_late")
    return found


ORDER = message_factory.GetMessages(descriptors().file)["shop.Order"]
