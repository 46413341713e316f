//! Descriptors that lie: each ends in a typed error, before the driver is asked where that can be, and leaves nothing.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/simulated.rs"]
mod simulated;
mod support;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;

use cuvmm_driver::sys::{CUmemAllocationHandleType, CUuuid};
use cuvmm_driver::{CUresult, Call};
use cuvmm_ipc::wire::Refusal;
use cuvmm_ipc::{
    BufferDescriptor, Error, HostId, Limits, Location, Metadata, export, import, import_from, receive_buffer, send,
};
use cuvmm_resource::{Options, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{Machine, Preset};
use simulated::{Bench, G, grown, leaves_nothing, shareable};
use support::{OpenFiles, memory_file, pair, soon};

/// A good descriptor of three chunks, changed.
fn lie(resource: &VirtualMemoryResource, change: impl FnOnce(&mut Metadata, &mut Vec<OwnedFd>)) -> BufferDescriptor {
    let (mut metadata, mut handles) = export(&grown(resource, 3)).unwrap().into_parts().unwrap();
    change(&mut metadata, &mut handles);
    BufferDescriptor::new(metadata, handles).unwrap()
}

/// Imports it in each of three ways, which must end alike and leave nothing; gives the error, and what the sender heard.
fn refuse(bench: &Bench, resource: &VirtualMemoryResource, descriptor: BufferDescriptor) -> (Error, Error) {
    let live = bench.live();
    let open = OpenFiles::count();
    let handles = descriptor.fds().len();
    bench.simulator.clear_calls();
    let error = import_from(resource, &descriptor).unwrap_err();
    if error.call().is_none() {
        // Not even a range was reserved.
        let calls = bench.simulator.calls();
        assert!(!calls.contains(&Call::cuMemImportFromShareableHandle), "{calls:?}");
        assert!(!calls.contains(&Call::cuMemAddressReserve), "{calls:?}");
    }
    bench.assert_live(&live);
    assert_eq!(OpenFiles::count(), open, "{error}");

    let (ours, theirs) = pair();
    let (sent, received) = thread::scope(|scope| {
        let sender = scope.spawn(|| send(&ours, &descriptor, soon()));
        let received = receive_buffer(&theirs, resource, &Limits::default(), soon()).unwrap_err();
        drop(theirs);
        (sender.join().unwrap().unwrap_err(), received)
    });
    assert_eq!(std::mem::discriminant(&received), std::mem::discriminant(&error), "{received} and {error}");
    drop(ours);
    bench.assert_live(&live);
    assert_eq!(OpenFiles::count(), open, "{received}");

    let by_value = import(resource, descriptor).unwrap_err();
    // The words may name addresses, which differ.
    assert_eq!(std::mem::discriminant(&by_value), std::mem::discriminant(&error), "{by_value} and {error}");
    assert_eq!((by_value.call(), by_value.code()), (error.call(), error.code()));
    let mut live = live;
    live.device_bytes = bench.live().device_bytes;
    bench.assert_live(&live);
    // The simulator closes its own file of memory that nobody holds any more.
    assert!(OpenFiles::count() <= open - handles, "an import by value closes every handle, also in vain");
    (error, sent)
}

/// As [`refuse`], of a changed descriptor on a small machine.
fn check(change: impl FnOnce(&mut Metadata, &mut Vec<OwnedFd>), expect: fn(&Error) -> bool, reason: Refusal) {
    leaves_nothing(|bench, resource| {
        let (error, heard) = refuse(bench, resource, lie(resource, change));
        assert!(expect(&error), "{error}");
        assert!(matches!(heard, Error::Refused { reason: told, .. } if told == reason), "{heard}");
    });
}

#[test]
fn a_chunk_that_is_said_to_be_larger_is_refused_by_the_map() {
    for chunk in 0..3 {
        leaves_nothing(|bench, resource| {
            let lying = lie(resource, |metadata, _| metadata.sizes[chunk] += G);
            let told = lying.sizes()[chunk];
            let (error, heard) = refuse(bench, resource, lying);
            assert_eq!(error.call(), Some(Call::cuMemMap), "{error}");
            let Error::Chunk { chunk: which, bytes, .. } = error else { panic!("{error}") };
            assert_eq!((which, bytes), (chunk, told));
            assert!(matches!(heard, Error::Refused { reason: Refusal::DRIVER, .. }), "{heard}");
        });
    }
}

#[test]
fn a_chunk_that_is_said_to_be_smaller_is_refused_by_the_map() {
    check(
        |metadata, _| {
            metadata.sizes[1] -= G;
            metadata.size -= G;
        },
        |error| error.call() == Some(Call::cuMemMap),
        Refusal::DRIVER,
    );
}

#[test]
fn a_chunk_of_no_granular_size_is_refused_before_the_driver_is_asked() {
    check(
        |metadata, _| {
            metadata.sizes[2] -= 1;
            metadata.size -= 1;
        },
        |error| matches!(error, Error::ChunkSize { chunk: 2, granularity: G, .. }),
        Refusal::CHUNK_SIZE,
    );
}

#[test]
fn sizes_in_another_order_are_refused_by_the_map() {
    check(|metadata, _| metadata.sizes.rotate_left(1), |error| error.call() == Some(Call::cuMemMap), Refusal::DRIVER);
}

#[test]
fn another_kind_of_handle_is_refused() {
    for kind in [0, 3, 9].map(CUmemAllocationHandleType) {
        check(
            |metadata, _| metadata.handle_kind = kind,
            |error| matches!(error, Error::WrongHandleKind { ours, .. } if ours.0 == 1),
            Refusal::HANDLE_KIND,
        );
    }
}

#[test]
fn another_device_is_refused() {
    check(
        |metadata, _| metadata.location = Some(Location::Device { uuid: CUuuid { bytes: [9; 16] } }),
        |error| matches!(error, Error::HiddenDevice { uuid: Some(uuid) } if uuid.bytes == [9; 16]),
        Refusal::LOCATION,
    );
    check(
        |metadata, _| metadata.location = Some(Location::HostNuma { node: 0 }),
        |error| matches!(error, Error::WrongLocation { theirs: Location::HostNuma { node: 0 }, .. }),
        Refusal::LOCATION,
    );
}

#[test]
fn another_host_is_refused() {
    check(
        |metadata, _| metadata.host = HostId::new([7; 16]),
        |error| matches!(error, Error::WrongHost { .. }),
        Refusal::HOST,
    );
}

#[test]
fn a_file_that_is_no_handle_is_refused_by_the_driver() {
    for chunk in 0..3 {
        check(
            |_, handles| handles[chunk] = memory_file(),
            |error| error.call() == Some(Call::cuMemImportFromShareableHandle),
            Refusal::DRIVER,
        );
    }
}

#[test]
fn a_file_of_another_kind_never_reaches_the_driver() {
    let file = |path: &str| OwnedFd::from(std::fs::File::open(path).unwrap());
    let others: [&dyn Fn() -> OwnedFd; 5] = [
        &|| file("/dev/null"),
        &|| file("/"),
        &|| UnixStream::pair().unwrap().0.into(),
        &|| std::io::pipe().unwrap().0.into(),
        &|| file("/dev/urandom"),
    ];
    for other in others {
        check(
            |_, handles| handles[1] = other(),
            |error| matches!(error, Error::WrongFile { chunk: 1, .. }),
            Refusal::HANDLES,
        );
    }
}

#[test]
fn what_is_not_told_is_not_compared() {
    let _files = OpenFiles::watch();
    let bench = Bench::small();
    let resource = bench.shareable();
    let descriptor = lie(&resource, |metadata, _| {
        metadata.location = None;
        metadata.id = None;
        metadata.host = None;
    });
    assert_eq!(import(&resource, descriptor).unwrap().chunks().len(), 3);
}

#[test]
fn one_handle_for_all_chunks_gives_aliases_of_one_chunk() {
    let _files = OpenFiles::watch();
    let bench = Bench::small();
    let resource = bench.shareable();
    let (_, handles) = export(&resource.allocate(G).unwrap()).unwrap().into_parts().unwrap();
    let handles: Vec<_> = (0..3).map(|_| handles[0].try_clone().unwrap()).collect();
    let imported = import(&resource, BufferDescriptor::new(Metadata::new(vec![G; 3]), handles).unwrap()).unwrap();
    imported.fill(0, G, 42).unwrap();
    let mut byte = [0];
    imported.copy_to_host(2 * G, &mut byte).unwrap();
    assert_eq!(byte, [42]);
}

#[test]
fn a_resource_that_shares_nothing_imports_nothing() {
    let _files = OpenFiles::watch();
    let bench = Bench::small();
    let descriptor = lie(&bench.shareable(), |_, _| {});
    let plain = VirtualMemoryResource::new(&bench.driver.device(0).unwrap(), Options::new()).unwrap();
    let error = import_from(&plain, &descriptor).unwrap_err();
    assert!(matches!(error, Error::WrongHandleKind { ours: CUmemAllocationHandleType::NONE, .. }), "{error}");
    // Nor when both say that there is no kind.
    let descriptor = lie(&bench.shareable(), |metadata, _| metadata.handle_kind = CUmemAllocationHandleType::NONE);
    assert!(matches!(import_from(&plain, &descriptor), Err(Error::WrongHandleKind { .. })));
}

#[test]
fn memory_of_another_device_than_was_said_is_found_out_by_the_drivers_word() {
    let _files = OpenFiles::watch();
    let both = Machine::h200_pair();
    let exporter = Bench::new(both.clone());
    let honest = export(&shareable(&exporter.driver, 1).allocate(G).unwrap()).unwrap();

    let first = shareable(&exporter.driver, 0);
    let error = import_from(&first, &honest).unwrap_err();
    assert!(matches!(error, Error::WrongLocation { .. }), "{error}");

    let (mut metadata, handles) = honest.into_parts().unwrap();
    metadata.location = Some(Location::Device { uuid: first.device().uuid().unwrap() });
    let lying = BufferDescriptor::new(metadata, handles).unwrap();
    let error = import_from(&first, &lying).unwrap_err();
    assert!(
        matches!(error, Error::OtherMemory { chunk: 0, expected, found } if (expected.id, found.id) == (0, 1)),
        "{error}"
    );

    // A process that does not see the second device is refused the import, or told -2 after it.
    let hidden = both.visible(&[0]);
    let strict = Bench::new(hidden.clone().preset(Preset::Strict));
    let error = import_from(&strict.shareable(), &lying).unwrap_err();
    let refused = (Some(Call::cuMemImportFromShareableHandle), Some(CUresult::INVALID_DEVICE));
    assert_eq!((error.call(), error.code()), refused, "{error}");
    strict.assert_live(&Default::default());
    let measured = Bench::new(hidden.preset(Preset::Measured));
    let error = import_from(&measured.shareable(), &lying).unwrap_err();
    assert!(matches!(error, Error::HiddenDevice { uuid: None }), "{error}");
    measured.assert_live(&Default::default());
}

#[test]
fn a_buffer_beyond_the_limits_is_refused_before_its_handles_come() {
    leaves_nothing(|_, resource| {
        let descriptor = lie(resource, |_, _| {});
        let limits = [
            (Limits { max_handles: 2, ..Limits::default() }, Refusal::TOO_MANY_HANDLES),
            (Limits { max_bytes: descriptor.size() - 1, ..Limits::default() }, Refusal::TOO_MANY_BYTES),
        ];
        for (limits, reason) in limits {
            let (ours, theirs) = pair();
            thread::scope(|scope| {
                scope.spawn(|| receive_buffer(theirs, resource, &limits, soon()).unwrap_err());
                let error = send(&ours, &descriptor, soon()).unwrap_err();
                assert!(matches!(error, Error::Refused { reason: told, detail: 0 } if told == reason), "{error}");
            });
        }
    });
}

#[test]
fn the_sender_hears_the_drivers_code() {
    let _files = OpenFiles::watch();
    let bench = Bench::small();
    let resource = bench.shareable();
    let descriptor = lie(&resource, |_, handles| handles[2] = memory_file());
    let (error, heard) = refuse(&bench, &resource, descriptor);
    let code: CUresult = error.code().unwrap();
    assert!(matches!(heard, Error::Refused { reason: Refusal::DRIVER, detail } if detail == code.0), "{heard}");
}

/// Takes all memory of the first device.
fn fill_up(bench: &Bench) -> Vec<VirtualMemoryBuffer> {
    let plain = VirtualMemoryResource::new(&bench.driver.device(0).unwrap(), Options::new()).unwrap();
    let mut size = plain.device().total_memory().unwrap();
    let mut fill = Vec::new();
    while size >= G {
        match plain.allocate(size) {
            Ok(buffer) => fill.push(buffer),
            Err(_) => size /= 2,
        }
    }
    fill
}

/// A driver that could not make a handle of its own knows none by sight: what can't be one of any driver is refused,
/// and nothing is made for what a peer sends.
#[test]
fn a_full_device_imports_and_is_made_to_create_nothing() {
    let _files = OpenFiles::watch();
    let (exporter, importer) = (Bench::small(), Bench::small());
    let from = exporter.shareable();
    let buffer = grown(&from, 2);
    let fill = fill_up(&importer);
    let to = importer.shareable();
    assert_eq!(to.device().posix_fd_file(), None);
    importer.simulator.clear_calls();
    let imported: Vec<_> = (0..3).map(|_| import(&to, export(&buffer).unwrap()).unwrap()).collect();
    assert_eq!(imported[2].size(), buffer.size());
    let file = |path: &str| OwnedFd::from(std::fs::File::open(path).unwrap());
    let others = [
        file("/"),
        file("/proc/self/exe"),
        memory_file(),
        UnixStream::pair().unwrap().0.into(),
        std::io::pipe().unwrap().0.into(),
    ];
    for other in others {
        let lying = lie(&from, |_, handles| handles[1] = other);
        let error = import(&to, lying).unwrap_err();
        assert!(matches!(error, Error::WrongFile { chunk: 1, expected: None, .. }), "{error}");
    }
    let calls = importer.simulator.calls();
    assert!(!calls.contains(&Call::cuMemCreate), "{calls:?}");
    // Once there is memory again, a probe tells.
    drop(fill);
    drop(importer.shareable());
    let error = import(&to, lie(&from, |_, handles| handles[0] = file("/dev/null"))).unwrap_err();
    assert!(matches!(error, Error::WrongFile { chunk: 0, expected: Some(_), .. }), "{error}");
}

#[test]
fn a_full_device_knows_handles_by_those_of_another() {
    let _files = OpenFiles::watch();
    let pair = || Bench::new(Machine::h200_pair().device_memory(64 << 20));
    let (exporter, importer) = (pair(), pair());
    let buffer = exporter.shareable().allocate(2 << 20).unwrap();
    let _fill = fill_up(&importer);
    drop(shareable(&importer.driver, 1));
    let to = importer.shareable();
    assert_eq!(to.device().posix_fd_file(), None);
    import(&to, export(&buffer).unwrap()).unwrap().close().unwrap();
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let error = import(&to, BufferDescriptor::new(Metadata::new(vec![2 << 20]), [null]).unwrap()).unwrap_err();
    assert!(matches!(error, Error::WrongFile { chunk: 0, expected: Some(_), .. }), "{error}");
}

#[test]
fn no_handles_need_no_call() {
    let _files = OpenFiles::watch();
    let bench = Bench::small();
    let resource = bench.shareable();
    let descriptor = BufferDescriptor::new(Metadata::new(Vec::new()), Vec::<OwnedFd>::new()).unwrap();
    bench.simulator.clear_calls();
    assert!(import(&resource, descriptor).unwrap().is_empty());
    assert_eq!(bench.simulator.calls(), []);
}
