//! Buffers that are shared by fabric handle: bytes, good on every host of the fabric, that pin nothing by themselves.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/simulated.rs"]
mod simulated;
mod support;

use std::os::fd::AsFd;
use std::thread;

use cuvmm_driver::sys::{CUmemAllocationHandleType, CUmemFabricHandle, CUresult, CUuuid};
use cuvmm_driver::{Call, Probe};
use cuvmm_ipc::wire::{self, Refusal};
use cuvmm_ipc::{
    BufferDescriptor, Error, HostId, Importer, Limits, Location, Metadata, export, export_as, import, import_from,
    receive, receive_buffer, send, send_buffer,
};
use cuvmm_resource::{HandleKind, Options, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{Live, Machine, NumaNode, Preset};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};
use simulated::{Bench, G, assert_reads, grown, write};
use support::{OpenFiles, memory_file, pair, send_raw, soon};

const POSIX: CUmemAllocationHandleType = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::FABRIC;
const BOTH: CUmemAllocationHandleType = CUmemAllocationHandleType(POSIX.0 | FABRIC.0);

fn with_channel() -> Bench {
    Bench::new(Machine::small().with_imex())
}

fn of_kind(bench: &Bench, kind: HandleKind) -> VirtualMemoryResource {
    VirtualMemoryResource::new(&bench.driver.device(0).unwrap(), Options::new().handle_kind(kind)).unwrap()
}

fn told(kind: CUmemAllocationHandleType, chunks: usize) -> Metadata {
    let mut metadata = Metadata::new(vec![G; chunks]);
    metadata.handle_kind = kind;
    metadata
}

/// Runs `work` with two processes that have a channel, and demands that it leaves nothing in either, and no open file.
fn leaves_nothing(work: impl FnOnce(&Bench, &VirtualMemoryResource, &Bench, &VirtualMemoryResource)) {
    let files = OpenFiles::watch();
    let (exporter, importer) = (with_channel(), with_channel());
    let (ours, theirs) = (of_kind(&exporter, HandleKind::Fabric), of_kind(&importer, HandleKind::Fabric));
    work(&exporter, &ours, &importer, &theirs);
    drop((ours, theirs));
    exporter.assert_live(&Live::default());
    importer.assert_live(&Live::default());
    drop((exporter, importer));
    files.assert_unchanged();
}

fn require_shared(buffer: &VirtualMemoryBuffer, imported: &VirtualMemoryBuffer, seed: u8) {
    assert_eq!(imported.size(), buffer.size());
    write(buffer, seed);
    assert_reads(imported, seed);
    write(imported, seed + 1);
    assert_reads(buffer, seed + 1);
}

#[test]
fn memory_is_shared_by_fabric_handle_in_each_way() {
    leaves_nothing(|_, ours, _, theirs| {
        let buffer = grown(ours, 3);
        let descriptor = export(&buffer).unwrap();
        assert_eq!((descriptor.handle_kind(), descriptor.sizes().len()), (FABRIC, 3));
        assert_eq!((descriptor.fabric_handles().len(), descriptor.fds().len()), (3, 0));
        require_shared(&buffer, &import_from(theirs, &descriptor).unwrap(), 1);
        require_shared(&buffer, &import(theirs, descriptor.try_clone().unwrap()).unwrap(), 3);
        // In the process that exported it, it is an alias.
        require_shared(&buffer, &import_from(ours, &descriptor).unwrap(), 5);

        let (left, right) = pair();
        let (received, imported) = thread::scope(|scope| {
            scope.spawn(|| {
                send(&left, &descriptor, soon()).unwrap();
                send_buffer(&left, &buffer, soon()).unwrap();
            });
            let received = receive(&right, &Limits::default(), soon()).unwrap();
            (received, receive_buffer(&right, theirs, &Limits::default(), soon()).unwrap())
        });
        assert_eq!(received.metadata(), descriptor.metadata());
        assert_eq!(received.fabric_handles(), descriptor.fabric_handles());
        require_shared(&buffer, &imported, 7);
        require_shared(&buffer, &import(theirs, received).unwrap(), 9);
        assert!(matches!(export(&imported), Err(Error::Imported { chunk: 0 })));
    });
}

#[test]
fn the_kind_is_the_memorys_or_the_one_asked_for() {
    let _files = OpenFiles::watch();
    let bench = with_channel();
    let none = CUmemAllocationHandleType::NONE;
    let kinds = [HandleKind::None, HandleKind::PosixFd, HandleKind::Fabric, HandleKind::PosixFdAndFabric];
    // By what the memory has, and what is asked for: the kind of the handles, or the kind that it lacks.
    let expect: [[Result<_, _>; 4]; 4] = [
        [Err(none), Err(POSIX), Err(FABRIC), Err(POSIX)],
        [Err(none), Ok(POSIX), Err(FABRIC), Ok(POSIX)],
        [Err(none), Err(POSIX), Ok(FABRIC), Ok(FABRIC)],
        [Err(none), Ok(POSIX), Ok(FABRIC), Ok(POSIX)],
    ];
    for (has, expect) in kinds.into_iter().zip(expect) {
        let buffer = grown(&of_kind(&bench, has), 2);
        for (asked, expect) in kinds.into_iter().zip(expect) {
            bench.simulator.clear_calls();
            match (export_as(&buffer, asked), expect) {
                (Ok(descriptor), Ok(kind)) => {
                    assert_eq!(descriptor.handle_kind(), kind);
                    let handles = (descriptor.fds().len(), descriptor.fabric_handles().len());
                    assert_eq!(handles, if kind == POSIX { (2, 0) } else { (0, 2) });
                }
                (Err(Error::NotExportable { has: told, wanted }), Err(lacks)) => {
                    assert_eq!((told, wanted), (has.as_driver(), lacks));
                    assert_eq!(bench.simulator.calls(), []);
                }
                other => panic!("{has:?} as {asked:?}: {other:?}"),
            }
        }
        let default = export(&buffer).map(|descriptor| descriptor.handle_kind()).ok();
        assert_eq!(default, expect[3].ok(), "{has:?}");
    }
}

#[test]
fn an_exporters_descriptor_pins_the_memory_and_a_received_one_does_not() {
    leaves_nothing(|exporter, ours, importer, theirs| {
        let buffer = ours.allocate(2 * G).unwrap();
        write(&buffer, 1);
        let descriptor = export(&buffer).unwrap();
        buffer.close().unwrap();
        assert_eq!(exporter.simulator.physical_bytes(0), 2 * G);
        let clone = descriptor.try_clone().unwrap();
        descriptor.close();
        let told = |descriptor: &BufferDescriptor| {
            let (metadata, handles) = (descriptor.metadata().clone(), descriptor.fabric_handles().to_vec());
            BufferDescriptor::from_fabric_handles(metadata, handles).unwrap()
        };
        let received = told(&clone);
        let imported = import_from(theirs, &received).unwrap();
        assert_reads(&imported, 1);
        // By value, what the descriptor keeps is kept until all is imported.
        assert_reads(&import(theirs, clone).unwrap(), 1);
        // The import keeps the memory, and nothing else does; a handle to what is gone is the driver's to refuse.
        imported.close().unwrap();
        assert_eq!(exporter.simulator.physical_bytes(0), 0);
        let live = importer.live();
        let error = import_from(theirs, &received).unwrap_err();
        assert_eq!(error.call(), Some(Call::cuMemImportFromShareableHandle), "{error}");
        importer.assert_live(&live);
    });
}

#[test]
fn any_number_of_chunks_passes_in_batches_and_needs_no_open_file() {
    for chunks in [0, 1, 16, 17, 253, 254, 600] {
        let _files = OpenFiles::watch();
        let metadata = told(FABRIC, chunks);
        let handles: Vec<_> = (0..chunks as u64)
            .map(|chunk| {
                let mut handle = CUmemFabricHandle::default();
                handle.data[..8].copy_from_slice(&chunk.to_le_bytes());
                handle
            })
            .collect();
        let descriptor = BufferDescriptor::from_fabric_handles(metadata, handles).unwrap();
        let (left, right) = pair();
        let before = OpenFiles::count();
        thread::scope(|scope| {
            scope.spawn(|| send(&left, &descriptor, soon()).unwrap());
            let received = receive(&right, &Limits::default(), soon()).unwrap();
            assert_eq!(OpenFiles::count(), before);
            assert_eq!(received.metadata(), descriptor.metadata());
            assert_eq!(received.fabric_handles(), descriptor.fabric_handles());
        });
    }
    leaves_nothing(|_, ours, _, theirs| {
        let buffer = grown(ours, 70);
        let (left, right) = pair();
        thread::scope(|scope| {
            scope.spawn(|| send_buffer(&left, &buffer, soon()).unwrap());
            let imported = receive_buffer(&right, theirs, &Limits::default(), soon()).unwrap();
            require_shared(&buffer, &imported, 1);
        });
    });
}

#[test]
fn a_descriptor_has_handles_of_the_kind_that_it_tells() {
    let _files = OpenFiles::watch();
    let of = |kind| told(kind, 1);
    let fabric = vec![CUmemFabricHandle::default()];
    for kind in [POSIX, BOTH, CUmemAllocationHandleType::NONE] {
        match BufferDescriptor::from_fabric_handles(of(kind), fabric.clone()) {
            Err(Error::HandlesOfAnotherKind { found, wanted }) => assert_eq!((found, wanted), (FABRIC, kind)),
            other => panic!("{other:?}"),
        }
    }
    match BufferDescriptor::new(of(FABRIC), vec![memory_file()]) {
        Err(Error::HandlesOfAnotherKind { found, wanted }) => assert_eq!((found, wanted), (POSIX, FABRIC)),
        other => panic!("{other:?}"),
    }
    let two = BufferDescriptor::from_fabric_handles(of(FABRIC), [fabric.clone(), fabric.clone()].concat());
    assert!(matches!(two, Err(Error::HandleCount { handles: 2, chunks: 1 })));
    let descriptor = BufferDescriptor::from_fabric_handles(of(FABRIC), fabric).unwrap();
    match descriptor.into_parts() {
        Err(Error::HandlesOfAnotherKind { found, wanted }) => assert_eq!((found, wanted), (FABRIC, POSIX)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_resource_takes_the_kinds_that_it_is_made_for_alone() {
    let _files = OpenFiles::watch();
    let bench = with_channel();
    let buffer = grown(&of_kind(&bench, HandleKind::PosixFdAndFabric), 2);
    let by_kind = |kind| export_as(&buffer, kind).unwrap();
    let descriptors = [by_kind(HandleKind::PosixFd), by_kind(HandleKind::Fabric)];
    let cases = [
        (HandleKind::None, [false, false]),
        (HandleKind::PosixFd, [true, false]),
        (HandleKind::Fabric, [false, true]),
        (HandleKind::PosixFdAndFabric, [true, true]),
    ];
    for (kind, expect) in cases {
        let resource = of_kind(&bench, kind);
        for (descriptor, expect) in descriptors.iter().zip(expect) {
            bench.simulator.clear_calls();
            match import_from(&resource, descriptor) {
                Ok(imported) => assert_eq!((imported.size(), expect), (buffer.size(), true)),
                Err(Error::WrongHandleKind { ours, theirs }) => {
                    assert_eq!((ours, theirs, expect), (kind.as_driver(), descriptor.handle_kind(), false));
                    assert_eq!(bench.simulator.calls(), []);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Has `resource` receive what a peer sends that is no library of ours; gives the error, and what the peer heard.
fn receive_from_peer(
    bench: &Bench,
    resource: &VirtualMemoryResource,
    peer: impl FnOnce(&std::os::unix::net::UnixStream),
) -> (Error, wire::Reply) {
    let (live, files) = (bench.live(), OpenFiles::count());
    let (left, right) = pair();
    peer(&left);
    let error = receive_buffer(&right, resource, &Limits::default(), soon()).unwrap_err();
    drop(right);
    let mut reply = [0; wire::REPLY_LENGTH];
    std::io::Read::read_exact(&mut &left, &mut reply).unwrap();
    drop(left);
    bench.assert_live(&live);
    assert_eq!(OpenFiles::count(), files, "{error}");
    (error, wire::Reply::decode(&reply).unwrap())
}

#[test]
fn what_a_peer_sends_instead_ends_in_a_typed_error() {
    leaves_nothing(|_, ours, importer, theirs| {
        let descriptor = export(&grown(ours, 3)).unwrap();
        let header = wire::encode(descriptor.metadata()).unwrap();
        let good = wire::encode_fabric_handles(descriptor.fabric_handles());
        let file = memory_file();
        let check = |message: &[u8], files: usize, expect: fn(&Error) -> bool, reason: Refusal| {
            importer.simulator.clear_calls();
            let (error, heard) = receive_from_peer(importer, theirs, |socket| {
                send_raw(socket, &header, &[]).unwrap();
                send_raw(socket, message, &vec![file.as_fd(); files]).unwrap();
            });
            assert!(expect(&error), "{error}");
            assert!(matches!(heard, wire::Reply::Refused { reason: told, .. } if told == reason), "{heard:?}");
            let asked = importer.simulator.calls().contains(&Call::cuMemImportFromShareableHandle);
            assert_eq!(asked, reason == Refusal::DRIVER, "{error}");
        };
        // Files, with the handles or instead of them.
        check(&good, 3, |error| matches!(error, Error::UnexpectedHandles { received: 3, .. }), Refusal::HANDLES);
        check(&good[..4], 3, |error| matches!(error, Error::UnexpectedHandles { received: 3, .. }), Refusal::HANDLES);
        // More than were announced, and more than can be.
        let four = wire::encode_fabric_handles(&[CUmemFabricHandle::default(); 4]);
        check(
            &four,
            0,
            |error| matches!(error, Error::UnexpectedHandles { announced: 3, received: 4 }),
            Refusal::HANDLES,
        );
        check(&254_u32.to_le_bytes(), 0, |error| matches!(error, Error::Wire(_)), Refusal::MALFORMED);
        // Bytes that name nothing, alone and behind one that does.
        let nothing = wire::encode_fabric_handles(&[CUmemFabricHandle::default(); 3]);
        check(&nothing, 0, |error| error.code().is_some(), Refusal::DRIVER);
        let mut last = good.clone();
        last[4 + 2 * 64..].fill(0xff);
        check(&last, 0, |error| error.code().is_some(), Refusal::DRIVER);
        // Handles in another order are other sizes than was said.
        let mut swapped = descriptor.fabric_handles().to_vec();
        swapped.rotate_left(1);
        let swapped = wire::encode_fabric_handles(&swapped);
        let error = receive_from_peer(importer, theirs, |socket| {
            send_raw(socket, &header, &[]).unwrap();
            send_raw(socket, &swapped, &[]).unwrap();
        });
        assert_eq!(error.0.call(), Some(Call::cuMemMap), "{}", error.0);
    });
}

/// What a peer does with the bytes of a good exchange: changes some, cuts them off, sends them in pieces, and files with one.
#[derive(Debug)]
struct Mischief {
    changes: Vec<(Index, u8)>,
    cut: Option<Index>,
    pieces: Vec<Index>,
    files: Option<Index>,
}

fn mischief() -> impl Strategy<Value = Mischief> {
    let changes = prop::collection::vec(any::<(Index, u8)>(), 0..4);
    let pieces = prop::collection::vec(any::<Index>(), 0..4);
    (changes, any::<Option<Index>>(), pieces, prop::option::weighted(0.2, any::<Index>()))
        .prop_map(|(changes, cut, pieces, files)| Mischief { changes, cut, pieces, files })
}

#[test]
fn whatever_a_peer_does_with_fabric_handles_leaves_nothing() {
    leaves_nothing(|_, ours, importer, theirs| {
        let descriptor = export(&grown(ours, 3)).unwrap();
        let file = memory_file();
        let handles = descriptor.fabric_handles();
        let good = [
            wire::encode(descriptor.metadata()).unwrap(),
            wire::encode_fabric_handles(&handles[..1]),
            wire::encode_fabric_handles(&handles[1..]),
        ]
        .concat();
        let (live, open) = (importer.live(), OpenFiles::count());
        let taken = std::cell::Cell::new(0);
        let config = Config { cases: 3_000, failure_persistence: None, ..Config::default() };
        let result = TestRunner::new(config).run(&mischief(), |mischief| {
            let mut bytes = good.clone();
            for (index, value) in &mischief.changes {
                *index.get_mut(&mut bytes) = *value;
            }
            bytes.truncate(mischief.cut.map_or(bytes.len(), |cut| cut.index(good.len()) + 1));
            let mut ends: Vec<_> = mischief.pieces.iter().map(|end| end.index(bytes.len())).collect();
            ends.extend([0, bytes.len()]);
            ends.sort_unstable();
            ends.dedup();
            let (left, right) = pair();
            let with_files = mischief.files.map(|piece| piece.index(ends.len() - 1));
            for (piece, range) in ends.windows(2).enumerate() {
                let files = if with_files == Some(piece) { vec![file.as_fd(); 2] } else { Vec::new() };
                send_raw(&left, &bytes[range[0]..range[1]], &files).unwrap();
            }
            drop(left);
            match receive_buffer(&right, theirs, &Limits::default(), soon()) {
                Ok(buffer) => {
                    let sizes: Vec<_> = buffer.chunks().iter().map(|chunk| chunk.size).collect();
                    // It may say that the buffer is shorter.
                    prop_assert!(descriptor.sizes().starts_with(&sizes) && with_files.is_none(), "{:?}", sizes);
                    taken.set(taken.get() + 1);
                }
                Err(Error::Timeout { .. }) => prop_assert!(false, "held up"),
                Err(_) => {}
            }
            drop(right);
            prop_assert_eq!((importer.live(), OpenFiles::count()), (live.clone(), open));
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{error}"));
        assert!(taken.get() > 0, "none of them was honest by chance");
    });
}

#[test]
fn a_sender_that_gives_up_or_goes_is_told_of() {
    leaves_nothing(|_, ours, _, theirs| {
        let descriptor = export(&grown(ours, 3)).unwrap();
        let header = wire::encode(descriptor.metadata()).unwrap();
        let one = wire::encode_fabric_handles(&descriptor.fabric_handles()[..1]);
        let receive = |messages: &[&[u8]]| {
            let (left, right) = pair();
            send_raw(&left, &header, &[]).unwrap();
            messages.iter().for_each(|message| send_raw(&left, message, &[]).unwrap());
            drop(left);
            receive_buffer(&right, theirs, &Limits::default(), soon()).unwrap_err()
        };
        assert!(matches!(receive(&[&one, &[0; 4]]), Error::Abandoned { sent: 1, chunks: 3 }));
        for cut in [0, 3, 4, 40, 67, 68] {
            let error = receive(&[&one[..cut]]);
            assert!(matches!(error, Error::Closed { .. }), "{cut}: {error}");
        }
    });
}

/// A machine whose device is none that another host's processes know.
fn of_another_host() -> Machine {
    let mut machine = Machine::small().with_imex();
    machine.devices[0].uuid = CUuuid { bytes: *b"another host's 1" };
    machine
}

/// As [`export`] on another host would give it.
fn export_there(buffer: &VirtualMemoryBuffer) -> BufferDescriptor {
    let exported = export(buffer).unwrap();
    let mut metadata = exported.metadata().clone();
    metadata.host = HostId::new([7; 16]);
    BufferDescriptor::from_fabric_handles(metadata, exported.fabric_handles().to_vec()).unwrap()
}

#[test]
fn memory_of_another_hosts_device_is_memory_of_one_that_is_not_visible_here() {
    let _files = OpenFiles::watch();
    let there = Bench::new(of_another_host());
    let buffer = grown(&of_kind(&there, HandleKind::Fabric), 3);
    let descriptor = export_there(&buffer);
    for preset in [Preset::Measured, Preset::Strict] {
        let here = Bench::new(Machine::small().with_imex().preset(preset));
        let resource = of_kind(&here, HandleKind::Fabric);
        let error = import_from(&resource, &descriptor).unwrap_err();
        assert!(matches!(error, Error::HiddenDevice { uuid: Some(_) }), "{error}");
        let importer = Importer::new(&resource).allow_hidden_device();
        match (importer.import_from(&descriptor), preset) {
            (Ok(imported), Preset::Measured) => require_shared(&buffer, &imported, 3),
            (Err(error), Preset::Strict) => assert_eq!(error.code(), Some(CUresult::INVALID_DEVICE)),
            (other, _) => panic!("{other:?}"),
        }
        // The same over a socket that a relay leads here.
        let (left, right) = pair();
        thread::scope(|scope| {
            let sender = scope.spawn(|| send(&left, &descriptor, soon()));
            let received = receive(&right, &Limits::default(), soon()).unwrap();
            sender.join().unwrap().unwrap();
            assert_eq!(received.host(), HostId::new([7; 16]));
        });
        drop(resource);
        here.assert_live(&Live::default());
    }
}

#[test]
fn a_node_of_another_host_is_not_the_node_of_that_number_here() {
    let _files = OpenFiles::watch();
    let bench = Bench::new(Machine::small().numa_nodes([NumaNode { id: 0, memory: 1 << 30 }]).with_imex());
    let location = cuvmm_resource::Location::HostNuma(0);
    let options = Options::new().location(location).handle_kind(HandleKind::Fabric);
    let resource = VirtualMemoryResource::new(&bench.driver.device(0).unwrap(), options).unwrap();
    let buffer = resource.allocate(G).unwrap();
    let here = export(&buffer).unwrap();
    assert_eq!(here.location(), Some(Location::HostNuma { node: 0 }));
    require_shared(&buffer, &import_from(&resource, &here).unwrap(), 1);
    let there = export_there(&buffer);
    assert!(matches!(import_from(&resource, &there), Err(Error::WrongHost { .. })));
    let (left, right) = pair();
    thread::scope(|scope| {
        let sender = scope.spawn(|| send(&left, &there, soon()));
        let error = receive(&right, &Limits::default(), soon()).unwrap_err();
        assert!(matches!(error, Error::WrongHost { .. }), "{error}");
        drop(right);
        let heard = sender.join().unwrap().unwrap_err();
        assert!(matches!(heard, Error::Refused { reason: Refusal::HOST, .. }), "{heard}");
    });
}

#[test]
fn without_a_channel_there_is_the_reason_and_files_are_shared_all_the_same() {
    let files = OpenFiles::watch();
    let bench = Bench::small();
    let device = bench.driver.device(0).unwrap();
    let refused = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::Fabric)).unwrap_err();
    assert!(matches!(refused, cuvmm_resource::Error::HandleKindRefused { kind: HandleKind::Fabric, .. }), "{refused}");
    assert_eq!((refused.call(), refused.code()), (Some(Call::cuMemCreate), Some(CUresult::NOT_PERMITTED)));
    assert!(matches!(device.probed(FABRIC), Some(Probe::Refused { .. })));
    let options = Options::new().handle_kind_or(HandleKind::PosixFdAndFabric, HandleKind::PosixFd);
    let resource = VirtualMemoryResource::new(&device, options).unwrap();
    assert!(resource.handle_refused().is_some());
    let buffer = grown(&resource, 2);
    let wanted = export_as(&buffer, HandleKind::Fabric).unwrap_err();
    assert!(matches!(wanted, Error::NotExportable { has: POSIX, wanted: FABRIC }), "{wanted}");
    let imported = import(&resource, export(&buffer).unwrap()).unwrap();
    require_shared(&buffer, &imported, 1);

    let exporter = with_channel();
    let theirs = export(&of_kind(&exporter, HandleKind::Fabric).allocate(G).unwrap()).unwrap();
    assert!(matches!(import_from(&resource, &theirs), Err(Error::WrongHandleKind { ours: POSIX, theirs: FABRIC })));
    drop((imported, buffer, resource, theirs));
    bench.assert_live(&Live::default());
    exporter.assert_live(&Live::default());
    drop((bench, exporter, device));
    files.assert_unchanged();
}
