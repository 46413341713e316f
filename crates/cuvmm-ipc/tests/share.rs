//! Sharing on the simulator: what is exported is what is imported, whoever closes first, and nothing stays behind.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/simulated.rs"]
mod simulated;
mod support;

use std::thread;

use cuvmm_driver::Call;
use cuvmm_ipc::{
    BufferDescriptor, Error, HostId, Limits, Location, export, import, import_from, receive, receive_buffer, send,
    send_buffer,
};
use cuvmm_resource::{Options, VirtualMemoryBuffer, VirtualMemoryResource};
use simulated::{Bench, G, assert_reads, grown, leaves_nothing, shareable, write};
use support::{OpenFiles, inodes, pair, soon};

fn through_a_socket(descriptor: &BufferDescriptor) -> BufferDescriptor {
    let (ours, theirs) = pair();
    thread::scope(|scope| {
        scope.spawn(|| send(&ours, descriptor, soon()).unwrap());
        receive(&theirs, &Limits::default(), soon()).unwrap()
    })
}

/// Exports straight from a buffer, and imports straight into one.
fn shared(buffer: &VirtualMemoryBuffer, resource: &VirtualMemoryResource) -> VirtualMemoryBuffer {
    let (ours, theirs) = pair();
    thread::scope(|scope| {
        scope.spawn(|| send_buffer(&ours, buffer, soon()).unwrap());
        receive_buffer(&theirs, resource, &Limits::default(), soon()).unwrap()
    })
}

#[test]
fn an_import_in_the_exporting_process_is_an_alias() {
    leaves_nothing(|bench, resource| {
        let before = bench.live();
        let buffer = grown(resource, 5);
        write(&buffer, 1);
        let alias = import(resource, export(&buffer).unwrap()).unwrap();
        assert_ne!(alias.address(), buffer.address());
        assert_eq!(alias.size(), buffer.size());
        assert_eq!(alias.chunks().len(), 5);
        assert_reads(&alias, 1);
        write(&alias, 2);
        assert_reads(&buffer, 2);
        buffer.close().unwrap();
        assert_reads(&alias, 2);
        alias.close().unwrap();
        let mut after = bench.live();
        // The stream that copies run on belongs to the resource.
        (after.streams, after.contexts) = (before.streams, before.contexts);
        assert_eq!(after, before);
    });
}

#[test]
fn a_descriptor_says_what_the_buffer_is() {
    let _files = OpenFiles::watch();
    let bench = Bench::small();
    let resource = bench.shareable();
    let buffer = grown(&resource, 4);
    let descriptor = export(&buffer).unwrap();
    let sizes: Vec<_> = buffer.chunks().iter().map(|chunk| chunk.size).collect();
    assert_eq!(descriptor.sizes(), sizes);
    assert_eq!(descriptor.size(), buffer.size());
    assert_eq!(descriptor.fds().len(), 4);
    assert_eq!(descriptor.handle_kind(), resource.handle_kind().as_driver());
    let uuid = resource.device().uuid().unwrap();
    assert_eq!(descriptor.device_uuid(), Some(uuid));
    assert_eq!(descriptor.location(), Some(Location::Device { uuid }));
    assert_eq!(descriptor.host(), HostId::current());
}

#[test]
fn two_exports_of_one_buffer_are_known_by_their_id_alone() {
    let _files = OpenFiles::watch();
    let bench = Bench::small();
    let resource = bench.shareable();
    let buffer = resource.allocate(G).unwrap();
    let (one, two) = (export(&buffer).unwrap(), export(&buffer).unwrap());
    assert_eq!(one.id(), two.id());
    let numbers = |descriptor: &BufferDescriptor| {
        descriptor.fds().map(|fd| std::os::fd::AsRawFd::as_raw_fd(&fd)).collect::<Vec<_>>()
    };
    assert_ne!(numbers(&one), numbers(&two));

    let larger = export(&buffer.grow(2 * G).unwrap()).unwrap();
    let (id, larger) = (one.id().unwrap(), larger.id().unwrap());
    assert_eq!(larger.family(), id.family());
    assert!(larger.generation() > id.generation());

    buffer.close().unwrap();
    let another = resource.allocate(G).unwrap();
    assert_ne!(export(&another).unwrap().id().unwrap().family(), id.family());
}

#[test]
fn a_descriptor_keeps_the_memory_after_the_buffer() {
    leaves_nothing(|bench, resource| {
        let buffer = grown(resource, 3);
        write(&buffer, 3);
        let charged = bench.live().device_bytes;
        let descriptor = export(&buffer).unwrap();
        buffer.close().unwrap();
        assert_eq!(bench.live().device_bytes, charged, "an open handle holds the memory");
        let received = through_a_socket(&descriptor);
        assert_eq!(received.metadata(), descriptor.metadata());
        drop(descriptor);
        assert_eq!(bench.live().device_bytes, charged);
        let imported = import_from(resource, &received).unwrap();
        assert_reads(&imported, 3);
        drop(received);
        assert_reads(&imported, 3);
        imported.close().unwrap();
        assert!(bench.live().device_bytes.is_empty());
    });
}

#[test]
fn ten_exports_leave_nothing_open() {
    leaves_nothing(|_, resource| {
        let buffer = grown(resource, 4);
        let before = OpenFiles::count();
        for _ in 0..10 {
            drop(export(&buffer).unwrap());
        }
        assert_eq!(OpenFiles::count(), before);
    });
}

#[test]
fn each_import_is_a_buffer_of_its_own() {
    let _files = OpenFiles::watch();
    let bench = Bench::small();
    let resource = bench.shareable();
    let buffer = grown(&resource, 2);
    write(&buffer, 4);
    let descriptor = export(&buffer).unwrap();
    drop(buffer);
    let [one, two, three] = [(); 3].map(|()| import_from(&resource, &descriptor).unwrap());
    assert!(one.address() != two.address() && two.address() != three.address() && one.address() != three.address());
    drop((descriptor, one, two));
    assert_reads(&three, 4);
    drop((three, resource));
    bench.assert_live(&Default::default());
}

#[test]
fn an_import_grows_by_memory_of_its_own() {
    let _files = OpenFiles::watch();
    let bench = Bench::small();
    let resource = bench.shareable();
    let buffer = grown(&resource, 2);
    write(&buffer, 5);
    let imported = import(&resource, export(&buffer).unwrap()).unwrap();
    let larger = imported.grow(imported.size() + G).unwrap();
    larger.fill(imported.size(), G, 9).unwrap();
    assert_reads(&imported, 5);
    assert_eq!(larger.chunks().len(), 3);
    assert!(matches!(export(&larger), Err(Error::Imported { chunk: 0 })));
    drop((buffer, imported, larger, resource));
    bench.assert_live(&Default::default());
}

#[test]
fn a_shorter_prefix_is_imported_as_such() {
    let _files = OpenFiles::watch();
    let bench = Bench::small();
    let resource = bench.shareable();
    let buffer = grown(&resource, 3);
    write(&buffer, 6);
    let (mut metadata, handles) = export(&buffer).unwrap().into_parts().unwrap();
    let sum = metadata.size;
    metadata.size = G + 1000;
    let descriptor = BufferDescriptor::new(metadata, handles).unwrap();
    let imported = import(&resource, through_a_socket(&descriptor)).unwrap();
    assert_eq!(imported.size(), G + 1000);
    let live = bench.live();
    let whole = imported.grow(sum).unwrap();
    assert_eq!((whole.size(), whole.address()), (sum, imported.address()));
    assert_eq!(bench.live(), live, "what was mapped already needs no call");
    assert_reads(&whole, 6);
}

#[test]
fn an_empty_buffer_travels_without_handles() {
    leaves_nothing(|_, resource| {
        let empty = resource.allocate(0).unwrap();
        let descriptor = export(&empty).unwrap();
        assert_eq!((descriptor.size(), descriptor.fds().len()), (0, 0));
        let imported = import(resource, through_a_socket(&descriptor)).unwrap();
        assert!(imported.is_empty());
        assert!(shared(&imported, resource).is_empty());
    });
}

#[test]
fn a_buffer_of_many_chunks_goes_through_a_socket_straight() {
    leaves_nothing(|_, resource| {
        for chunks in [1, 16, 17, 64, 300] {
            let buffer = grown(resource, chunks);
            write(&buffer, chunks as u8);
            let imported = shared(&buffer, resource);
            assert_reads(&imported, chunks as u8);
            assert_eq!(imported.chunks().len(), chunks);
            drop(buffer);
            assert_reads(&imported, chunks as u8);
        }
    });
}

#[test]
fn a_received_descriptor_can_be_forwarded() {
    let _files = OpenFiles::watch();
    let bench = Bench::small();
    let resource = bench.shareable();
    let buffer = grown(&resource, 2);
    write(&buffer, 7);
    let first = through_a_socket(&export(&buffer).unwrap());
    let second = through_a_socket(&first);
    assert_eq!(inodes(&second), inodes(&first));
    assert_eq!(second.id(), first.id());
    let imported = import(&resource, second.try_clone().unwrap()).unwrap();
    assert_reads(&imported, 7);
    bench.simulator.clear_calls();
    assert!(matches!(export(&imported), Err(Error::Imported { chunk: 0 })));
    assert_eq!(bench.simulator.calls(), []);
    assert_reads(&import(&resource, second).unwrap(), 7);
}

#[test]
fn memory_that_was_not_made_for_it_is_not_exported() {
    let _files = OpenFiles::watch();
    let bench = Bench::small();
    let resource = VirtualMemoryResource::new(&bench.driver.device(0).unwrap(), Options::new()).unwrap();
    for size in [0, G] {
        let buffer = resource.allocate(size).unwrap();
        bench.simulator.clear_calls();
        let error = export(&buffer).unwrap_err();
        assert!(matches!(error, Error::NotExportable { .. }), "{error}");
        let (ours, _theirs) = pair();
        assert!(matches!(send_buffer(&ours, &buffer, soon()), Err(Error::NotExportable { .. })));
        assert_eq!(bench.simulator.calls(), []);
    }
}

#[test]
fn a_buffer_crosses_from_one_simulated_driver_to_another() {
    let _files = OpenFiles::watch();
    let (exporter, importer) = (Bench::small(), Bench::small());
    let (from, to) = (exporter.shareable(), importer.shareable());
    let buffer = grown(&from, 3);
    write(&buffer, 8);
    let imported = shared(&buffer, &to);
    assert_reads(&imported, 8);
    drop((buffer, from));
    assert_reads(&imported, 8);
    drop((imported, to));
    exporter.assert_live(&Default::default());
    importer.assert_live(&Default::default());
}

#[test]
fn a_buffer_of_the_second_device_is_imported_by_its_uuid() {
    let _files = OpenFiles::watch();
    let pair = cuvmm_sim::Machine::h200_pair();
    let exporter = Bench::new(pair.clone());
    // The importer sees that device alone, and numbers it otherwise.
    let importer = Bench::new(pair.visible(&[1]));
    let buffer = shareable(&exporter.driver, 1).allocate(G).unwrap();
    buffer.fill(0, buffer.size(), 11).unwrap();
    let imported = shared(&buffer, &importer.shareable());
    let mut byte = [0];
    imported.copy_to_host(imported.size() - 1, &mut byte).unwrap();
    assert_eq!(byte, [11]);
}

#[test]
fn the_drivers_own_probe_is_made_once_per_device() {
    let _files = OpenFiles::watch();
    let bench = Bench::small();
    let resource = bench.shareable();
    let buffer = resource.allocate(G).unwrap();
    let creates = || bench.simulator.calls().iter().filter(|call| **call == Call::cuMemCreate).count();
    drop(import(&resource, export(&buffer).unwrap()).unwrap());
    let once = creates();
    drop(import(&resource, export(&buffer).unwrap()).unwrap());
    drop(import(&bench.shareable(), export(&buffer).unwrap()).unwrap());
    assert_eq!(creates(), once);
}
