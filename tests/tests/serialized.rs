//! Options, limits and what a descriptor says, written and read as data: by names that stay, and nothing is lost, made up
//! or taken unchecked on the way.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fmt::Debug;
use std::time::Duration;

use cuvmm::driver::sys::{CUdeviceptr, CUmemAllocationHandleType, CUuuid};
use cuvmm::ipc::{BufferDescriptor, BufferId, HostId, Importer, Location, Metadata, export};
use cuvmm::{
    Access, GranularityKind, GrowthPolicy, HandleKind, Limits, OnDrop, Options, Recycling, Release, Request, StreamRef,
    resource,
};
use cuvmm_tests::{Backend, G, require_marks, write_marks};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, from_str, from_value, json, to_value};

cuvmm_tests::suite!(
    a_buffer_is_imported_by_what_was_written_of_it_and_its_handles,
    reading_what_was_written_makes_no_call,
    options_with_things_of_this_process_are_not_written,
);

fn a_buffer_is_imported_by_what_was_written_of_it_and_its_handles(backend: &Backend) {
    let shareable = backend.shareable();
    let buffer = shareable.allocate(G).unwrap().grow_into(3 * G).unwrap();
    write_marks(&buffer, 1);
    let exported = export(&buffer).unwrap();
    let text = serde_json::to_string(exported.metadata()).unwrap();
    let metadata: Metadata = from_str(&text).unwrap();
    assert_eq!(&metadata, exported.metadata());
    let (_, handles) = exported.into_parts().unwrap();
    let imported = Importer::new(&shareable).import(BufferDescriptor::new(metadata, handles).unwrap()).unwrap();
    require_marks(&imported, 1, 3 * G);
    imported.close().unwrap();
    buffer.close().unwrap();
}

fn reading_what_was_written_makes_no_call(backend: &Backend) {
    let buffer = backend.shareable().allocate(G).unwrap();
    let exported = export(&buffer).unwrap();
    let text = serde_json::to_string(exported.metadata()).unwrap();
    backend.require_no_call(|| {
        from_str::<Metadata>(&text).unwrap();
        from_str::<Options>("{}").unwrap();
    });
    drop(exported);
    buffer.close().unwrap();
}

fn options_with_things_of_this_process_are_not_written(backend: &Backend) {
    let device = &backend.device;
    let refused = |options: Options, what: &str| {
        let error = serde_json::to_string(&options).unwrap_err().to_string();
        assert!(error.contains(what) && error.contains("where the options are read"), "{error}");
    };
    let stream = StreamRef::create(device).unwrap();
    backend.require_no_call(|| {
        refused(Options::new().peer(device, Access::Read), "peers");
        refused(Options::new().on_out_of_memory(|_| false), "hook");
        refused(Options::new().release(Release::Stream(stream.clone())), "release stream");
    });
}

/// Writes it as that, and reads it back; gives what was read.
#[track_caller]
fn round<T: Serialize + DeserializeOwned + Debug>(value: &T, expect: Value) -> T {
    assert_eq!(to_value(value).unwrap(), expect);
    // By the text too: numbers up to the largest stay what they are.
    let read: T = from_str(&serde_json::to_string(value).unwrap()).unwrap();
    assert_eq!(format!("{read:?}"), format!("{value:?}"));
    read
}

/// Why it is not read.
#[track_caller]
fn unread<T: DeserializeOwned + Debug>(value: Value) -> String {
    from_value::<T>(value).unwrap_err().to_string()
}

#[test]
fn options_keep_their_names_and_values() {
    let default = json!({
        "location": "device", "handle_kind": "none", "handle_fallback": null, "granularity": "minimum",
        "alignment": 0, "address_hint": 0, "own_access": "read_write", "rdma": "off", "compression": "off",
        "max_chunk": null, "growth": "exact", "recycling": null, "release": "default_stream", "on_drop": "wait",
        "retry_out_of_memory": { "times": 0, "pause": { "secs": 0, "nanos": 0 } },
    });
    round(&Options::new(), default);
    let mut all = Options::new()
        .location(resource::Location::HostNuma(1))
        .handle_kind_or(HandleKind::PosixFdAndFabric, HandleKind::PosixFd)
        .granularity(GranularityKind::Recommended)
        .alignment(64 << 20)
        .own_access(Access::Read)
        .rdma(Request::IfSupported)
        .compression(Request::Required)
        .max_chunk(1 << 30)
        .growth(GrowthPolicy::doubling())
        .recycling(Recycling::up_to(1 << 30).for_at_most(Duration::from_secs(60)).shareable())
        .release(Release::Caller)
        .on_drop(OnDrop::Defer)
        .retry_out_of_memory(3, Duration::from_millis(1500));
    all.address_hint = CUdeviceptr(1 << 40);
    let expect = json!({
        "location": { "host_numa": 1 }, "handle_kind": "posix_fd_and_fabric", "handle_fallback": "posix_fd",
        "granularity": "recommended", "alignment": 64 << 20, "address_hint": 1u64 << 40, "own_access": "read",
        "rdma": "if_supported", "compression": "required", "max_chunk": 1 << 30,
        "growth": { "geometric": { "percent": 100, "floor": 0, "cap": usize::MAX } }, "release": "caller",
        "recycling": { "bytes": 1 << 30, "age": { "secs": 60, "nanos": 0 }, "shareable": true },
        "on_drop": "defer", "retry_out_of_memory": { "times": 3, "pause": { "secs": 1, "nanos": 500_000_000 } },
    });
    round(&all, expect);
}

#[test]
fn every_value_of_an_option_has_its_name() {
    let write = |values: &[&dyn erased::Write]| values.iter().map(|value| value.to_json()).collect::<Value>();
    let names = write(&[
        &resource::Location::Device,
        &resource::Location::Host,
        &resource::Location::HostNumaCurrent,
        &HandleKind::None,
        &HandleKind::PosixFd,
        &HandleKind::Fabric,
        &HandleKind::PosixFdAndFabric,
        &Access::None,
        &Access::Read,
        &Access::ReadWrite,
        &Request::Off,
        &Request::IfSupported,
        &Request::Required,
        &GrowthPolicy::Step(5),
    ]);
    let expect = json!([
        "device", "host", "host_numa_current", "none", "posix_fd", "fabric", "posix_fd_and_fabric", "none", "read",
        "read_write", "off", "if_supported", "required", { "step": 5 },
    ]);
    assert_eq!(names, expect);
}

/// Values of different types in one list.
mod erased {
    use serde::Serialize;
    use serde_json::{Value, to_value};

    pub(super) trait Write {
        fn to_json(&self) -> Value;
    }

    impl<T: Serialize> Write for T {
        fn to_json(&self) -> Value {
            to_value(self).unwrap()
        }
    }
}

#[test]
fn an_option_that_is_absent_has_its_default_and_one_that_is_not_known_is_refused() {
    let options: Options = from_value(json!({ "handle_kind": "posix_fd", "alignment": 1 << 21 })).unwrap();
    let expect = Options::new().handle_kind(HandleKind::PosixFd).alignment(1 << 21);
    assert_eq!(format!("{options:?}"), format!("{expect:?}"));
    let limits: Limits = from_value(json!({ "max_bytes": 5 })).unwrap();
    assert_eq!(limits, Limits { max_bytes: 5, ..Limits::default() });

    let unknown = |error: String| assert!(error.contains("unknown field"), "{error}");
    unknown(unread::<Options>(json!({ "colour": "blue" })));
    unknown(unread::<Options>(json!({ "peers": [] })));
    unknown(unread::<Options>(json!({ "retry_out_of_memory": { "hook": null } })));
    unknown(unread::<Options>(json!({ "growth": { "geometric": { "percent": 1, "floor": 0, "cap": 1, "more": 1 } } })));
    unknown(unread::<Options>(json!({ "recycling": { "bytes": 1, "more": 1 } })));
    let options: Options = from_value(json!({ "recycling": { "bytes": 1 << 30 } })).unwrap();
    assert_eq!(options.recycling, Some(Recycling::up_to(1 << 30)));
    unknown(unread::<Limits>(json!({ "max_files": 5 })));
    let error = unread::<Options>(json!({ "release": { "stream": 5 } }));
    assert!(error.contains("unknown variant `stream`"), "{error}");
}

#[test]
fn options_that_fit_no_device_are_not_read() {
    let check = |value: Value, what: &str| {
        let error = unread::<Options>(value.clone());
        assert!(error.contains(what), "{value}: {error}");
    };
    check(json!({ "alignment": 3 }), "alignment");
    check(json!({ "alignment": -1 }), "invalid value");
    check(json!({ "address_hint": 4096 }), "0x1000");
    check(json!({ "growth": { "step": 0 } }), "a step of 0 bytes");
    check(json!({ "recycling": { "bytes": 0 } }), "a budget of 0 bytes");
    check(json!({ "recycling": { "bytes": 1 << 30 }, "handle_kind": "posix_fd" }), "Recycling::shareable");
    check(json!({ "recycling": { "age": null } }), "missing field `bytes`");
    check(json!({ "location": "host", "handle_kind": "posix_fd" }), "host");
    check(json!({ "handle_kind": "win32" }), "unknown variant");
    check(json!({ "retry_out_of_memory": { "times": 1, "pause": -1 } }), "invalid type");
}

/// The sample in JSON that a README has.
fn sample(readme: &str) -> Value {
    let (_, rest) = readme.split_once("```json\n").expect("a sample");
    assert!(!rest.contains("```json"), "more than one");
    from_str(rest.split_once("```").expect("its end").0).unwrap()
}

#[test]
fn the_readmes_samples_are_read_and_have_every_field() {
    let options = sample(include_str!("../../crates/cuvmm-resource/README.md"));
    let fields = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(fields(&options), fields(&to_value(Options::new()).unwrap()));
    assert_eq!(to_value(from_value::<Options>(options.clone()).unwrap()).unwrap(), options);
    assert_eq!(format!("{:?}", from_str::<Options>("{}").unwrap()), format!("{:?}", Options::new()));
    let told = sample(include_str!("../../crates/cuvmm-ipc/README.md"));
    assert_eq!(fields(&told), fields(&to_value(metadata()).unwrap()));
    assert_eq!(to_value(from_value::<Metadata>(told.clone()).unwrap()).unwrap(), told);
}

fn metadata() -> Metadata {
    let mut metadata = Metadata::new(vec![2 << 20, 4 << 20]);
    metadata.size -= 1;
    metadata.location = Some(Location::Device { uuid: CUuuid { bytes: *b"0123456789abcdef" } });
    metadata.id = BufferId::new([0xab; 16], u64::MAX);
    metadata.host = HostId::new([1; 16]);
    metadata
}

#[test]
fn what_a_descriptor_says_keeps_its_names_and_values() {
    let untold = Metadata::new(Vec::new());
    let nothing = json!({
        "handle_kind": "posix_fd", "location": null, "id": null, "host": null, "sizes": [], "size": 0,
    });
    assert_eq!(round(&untold, nothing), untold);
    let expect = json!({
        "handle_kind": "posix_fd",
        "location": { "device": { "uuid": "GPU-30313233-3435-3637-3839-616263646566" } },
        "id": { "family": "ab".repeat(16), "generation": u64::MAX },
        "host": "01".repeat(16),
        "sizes": [2 << 20, 4 << 20],
        "size": (6 << 20) - 1,
    });
    assert_eq!(round(&metadata(), expect), metadata());
    let mut other = metadata();
    other.location = Some(Location::HostNuma { node: 1 });
    other.handle_kind = CUmemAllocationHandleType::FABRIC;
    let written = to_value(&other).unwrap();
    assert_eq!(
        (&written["location"], &written["handle_kind"]),
        (&json!({ "host_numa": { "node": 1 } }), &json!("fabric"))
    );
    assert_eq!(from_value::<Metadata>(written).unwrap(), other);
    other.handle_kind = CUmemAllocationHandleType(64);
    assert!(serde_json::to_string(&other).is_err());
    assert_eq!(round(&Limits::default(), json!({ "max_handles": 16384, "max_bytes": 1u64 << 40 })), Limits::default());
}

#[test]
fn what_is_no_descriptors_is_not_read() {
    let check = |change: fn(&mut Value), what: &str| {
        let mut value = to_value(metadata()).unwrap();
        change(&mut value);
        let error = unread::<Metadata>(value.clone());
        assert!(error.contains(what), "{value}: {error}");
    };
    check(|value| value["size"] = json!(6 << 20 | 1), "cannot be a prefix of chunks of");
    check(|value| value["size"] = json!(0), "cannot be a prefix of chunks of");
    check(|value| value["sizes"] = json!([5, 0]), "chunk 1 has no bytes");
    check(|value| value["sizes"] = json!([u64::MAX, 1]), "overflow at chunk 1");
    check(|value| value["sizes"] = json!([-1]), "invalid value");
    check(|value| value["sizes"] = json!(null), "invalid type");
    check(|value| value["handle_kind"] = json!("win32"), "unknown variant");
    check(|value| value["location"] = json!({ "device": { "uuid": "GPU-30" } }), "GPU- and 32 hexadecimal digits");
    check(|value| value["location"] = json!({ "device": { "uuid": "01".repeat(16) } }), "GPU- and 32");
    check(|value| value["location"] = json!({ "device": { "uuid": null } }), "invalid type");
    check(|value| value["location"] = json!({ "mars": {} }), "unknown variant");
    check(|value| value["id"] = json!({ "family": "0".repeat(32), "generation": 1 }), "not all of them 0");
    check(|value| value["id"] = json!({ "family": "ab".repeat(16) }), "missing field");
    check(|value| value["host"] = json!("0".repeat(32)), "not all of them 0");
    check(|value| value["host"] = json!("zz"), "32 hexadecimal digits");
    check(|value| value["colour"] = json!("blue"), "unknown field");
    check(|value| value["fds"] = json!([3, 4]), "unknown field");
    for required in ["handle_kind", "sizes", "size"] {
        let mut value = to_value(metadata()).unwrap();
        value.as_object_mut().unwrap().remove(required);
        assert!(unread::<Metadata>(value).contains("missing field"), "{required}");
    }
    for untold in ["location", "id", "host"] {
        let mut value = to_value(metadata()).unwrap();
        value.as_object_mut().unwrap().remove(untold);
        from_value::<Metadata>(value).unwrap();
    }
}
