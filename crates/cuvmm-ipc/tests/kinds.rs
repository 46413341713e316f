//! What can be shared with whom: handle kinds, granularities, and memory of the host.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/simulated.rs"]
mod simulated;
mod support;

use cuvmm_driver::Call;
use cuvmm_driver::sys::{CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemLocation};
use cuvmm_ipc::{BufferDescriptor, Error, Location, export, export_as, import, import_from};
use cuvmm_resource::{Access, GranularityKind, HandleKind, Options, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{Live, Machine, NumaNode};
use simulated::{Bench, G, assert_reads, write};
use support::OpenFiles;

const MIB: usize = 1 << 20;
const POSIX: CUmemAllocationHandleType = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::FABRIC;

fn resource(bench: &Bench, options: Options) -> VirtualMemoryResource {
    VirtualMemoryResource::new(&bench.driver.device(0).unwrap(), options).unwrap()
}

fn of_kind(bench: &Bench, kind: HandleKind) -> VirtualMemoryResource {
    resource(bench, Options::new().handle_kind(kind))
}

/// Shares one buffer between two resources, and demands that both see its bytes.
fn share(from: &VirtualMemoryResource, to: &VirtualMemoryResource, size: usize) -> VirtualMemoryBuffer {
    let buffer = from.allocate(size).unwrap();
    write(&buffer, 1);
    let descriptor = export(&buffer).unwrap();
    assert_eq!(descriptor.handle_kind(), POSIX);
    let imported = import(to, descriptor).unwrap();
    assert_reads(&imported, 1);
    write(&imported, 2);
    assert_reads(&buffer, 2);
    imported
}

#[test]
fn memory_of_both_kinds_is_shared_by_file_descriptor() {
    let files = OpenFiles::watch();
    let (exporter, importer) = (Bench::new(Machine::small().with_imex()), Bench::new(Machine::small().with_imex()));
    for (ours, theirs) in [
        (HandleKind::PosixFdAndFabric, HandleKind::PosixFdAndFabric),
        (HandleKind::PosixFdAndFabric, HandleKind::PosixFd),
        (HandleKind::PosixFd, HandleKind::PosixFdAndFabric),
    ] {
        share(&of_kind(&exporter, ours), &of_kind(&importer, theirs), 3 * G).close().unwrap();
    }
    exporter.assert_live(&Live::default());
    importer.assert_live(&Live::default());
    drop((exporter, importer));
    files.assert_unchanged();
}

#[test]
fn memory_of_fabric_handles_alone_is_not_shared_by_file_descriptor() {
    let _files = OpenFiles::watch();
    let bench = Bench::new(Machine::small().with_imex());
    let (fabric, shareable) = (of_kind(&bench, HandleKind::Fabric), of_kind(&bench, HandleKind::PosixFdAndFabric));
    let buffer = fabric.allocate(G).unwrap();
    let descriptor = export(&shareable.allocate(G).unwrap()).unwrap();
    bench.simulator.clear_calls();
    match export_as(&buffer, HandleKind::PosixFd) {
        Err(Error::NotExportable { has, wanted }) => assert_eq!((has, wanted), (FABRIC, POSIX)),
        other => panic!("{other:?}"),
    }
    match import_from(&fabric, &descriptor) {
        Err(Error::WrongHandleKind { ours, theirs }) => assert_eq!((ours, theirs), (FABRIC, POSIX)),
        other => panic!("{other:?}"),
    }
    // What came as a handle of another kind, of several, or of none, is no file descriptor.
    let (metadata, handles) = descriptor.into_parts().unwrap();
    for kind in [0, POSIX.0 | FABRIC.0, 2].map(CUmemAllocationHandleType) {
        let mut metadata = metadata.clone();
        metadata.handle_kind = kind;
        let handles = handles.iter().map(|handle| handle.try_clone().unwrap());
        match import(&shareable, BufferDescriptor::new(metadata, handles).unwrap()) {
            Err(Error::WrongHandleKind { theirs, .. }) => assert_eq!(theirs, kind),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(bench.simulator.calls(), []);
}

#[test]
fn chunks_are_mapped_as_they_are_whatever_the_importer_rounds_to() {
    let _files = OpenFiles::watch();
    let bench = Bench::new(Machine::h200().granularity(|_, option| {
        if option == CUmemAllocationGranularity_flags::RECOMMENDED { 64 * MIB } else { 2 * MIB }
    }));
    let plain = bench.shareable();
    let options = Options::new().handle_kind(HandleKind::PosixFd).granularity(GranularityKind::Recommended);
    let coarse = resource(&bench, options);
    let imported = share(&plain, &coarse, 5 * MIB);
    assert_eq!((imported.size(), imported.capacity(), imported.chunks()[0].size), (6 * MIB, 6 * MIB, 6 * MIB));
    imported.close().unwrap();

    let (mut metadata, handles) = export(&plain.allocate(6 * MIB).unwrap()).unwrap().into_parts().unwrap();
    metadata.sizes = vec![6 * MIB + 4096];
    match import(&coarse, BufferDescriptor::new(metadata, handles).unwrap()) {
        Err(Error::ChunkSize { chunk: 0, granularity, .. }) => assert_eq!(granularity, 2 * MIB),
        other => panic!("{other:?}"),
    }
}

/// A host of two nodes, as far as the driver knows.
fn two_nodes() -> Machine {
    Machine::small().numa_nodes([0, 1].map(|id| NumaNode { id, memory: 1 << 30 }))
}

fn on_node_0(bench: &Bench) -> VirtualMemoryResource {
    let location = cuvmm_resource::Location::HostNuma(0);
    resource(bench, Options::new().location(location).handle_kind(HandleKind::PosixFd))
}

#[test]
fn memory_of_a_node_is_shared_and_says_where_it_is() {
    let files = OpenFiles::watch();
    let (exporter, importer) = (Bench::new(two_nodes()), Bench::new(two_nodes()));
    let (ours, theirs) = (on_node_0(&exporter), on_node_0(&importer));
    let buffer = ours.allocate(G).unwrap().grow_into(40 * MIB).unwrap();
    let descriptor = export(&buffer).unwrap();
    assert_eq!(descriptor.location(), Some(Location::HostNuma { node: 0 }));
    assert_eq!(descriptor.device_uuid(), None);
    let imported = import_from(&theirs, &descriptor).unwrap();
    assert_eq!((imported.size(), imported.chunks().len()), (buffer.size(), buffer.chunks().len()));
    // The importing host may touch it, too.
    for chunk in imported.chunks() {
        let access = importer.driver.mem_get_access(CUmemLocation::host(), chunk.address).unwrap();
        assert_eq!(access, Access::ReadWrite.as_driver());
    }
    drop((buffer, descriptor, imported));
    share(&ours, &theirs, 3 * G).close().unwrap();
    drop((ours, theirs));
    exporter.assert_live(&Live::default());
    importer.assert_live(&Live::default());
    drop((exporter, importer));
    files.assert_unchanged();
}

#[test]
fn memory_elsewhere_is_refused_by_what_was_told_and_by_the_drivers_word() {
    let _files = OpenFiles::watch();
    let bench = Bench::new(two_nodes());
    let resources = [bench.shareable(), on_node_0(&bench)];
    let uuid = resources[0].device().uuid().unwrap();
    let told = [Location::Device { uuid }, Location::HostNuma { node: 0 }];
    let locations = [CUmemLocation::device(0), CUmemLocation::host_numa(0)];
    for (from, to) in [(0, 1), (1, 0)] {
        let descriptor = export(&resources[from].allocate(G).unwrap()).unwrap();
        bench.simulator.clear_calls();
        match import_from(&resources[to], &descriptor) {
            Err(Error::WrongLocation { ours, theirs }) => assert_eq!((ours, theirs), (told[to], told[from])),
            other => panic!("{other:?}"),
        }
        assert!(!bench.simulator.calls().contains(&Call::cuMemImportFromShareableHandle));

        // Who lies, or tells nothing, is found out by the driver.
        let (metadata, handles) = descriptor.into_parts().unwrap();
        for location in [Some(told[to]), None] {
            let mut metadata = metadata.clone();
            metadata.location = location;
            let handles = handles.iter().map(|handle| handle.try_clone().unwrap());
            match import(&resources[to], BufferDescriptor::new(metadata, handles).unwrap()) {
                Err(Error::OtherMemory { chunk: 0, found, expected }) => {
                    assert_eq!((found, expected), (locations[from], locations[to]));
                }
                other => panic!("{other:?}"),
            }
        }
    }
    // Of two nodes each is told by its number.
    let (mut metadata, handles) = export(&resources[1].allocate(G).unwrap()).unwrap().into_parts().unwrap();
    metadata.location = Some(Location::HostNuma { node: 1 });
    let refused = import(&resources[1], BufferDescriptor::new(metadata, handles).unwrap()).unwrap_err();
    assert!(matches!(refused, Error::WrongLocation { theirs: Location::HostNuma { node: 1 }, .. }), "{refused}");
    drop(resources);
    bench.assert_live(&Live::default());
}
