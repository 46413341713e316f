//! Sharing: between processes that live and die, within one, and with peers that lie.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use cuvmm::driver::sys::CUmemAllocationHandleType;
use cuvmm::ipc::{self, Error, export, import, import_from};
use cuvmm::{Call, Limits, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::{Backend, G, Peer, ROOM, after, occupy_behind, open_files, pattern, require_marks, write_marks};

cuvmm_tests::suite!(
    an_importer_that_is_killed_holds_nothing_up,
    memory_outlives_the_process_that_exported_it,
    memory_outlives_the_process_that_exported_it_and_ended,
    two_processes_write_to_each_other,
    a_descriptor_keeps_the_memory_of_a_buffer_that_is_closed,
    a_descriptor_keeps_the_memory_of_a_buffer_that_grew,
    an_import_in_the_exporting_process_is_an_alias,
    each_import_is_a_buffer_of_its_own,
    two_exports_of_one_buffer_have_one_id_and_different_files,
    another_buffer_has_another_id_also_at_the_same_address,
    every_chunk_of_a_grown_buffer_is_exported_in_order,
    what_is_imported_is_not_exported_again,
    what_is_imported_grows_and_keeps_its_bytes,
    an_empty_buffer_is_shared_without_a_call,
    no_file_is_open_before_the_export_and_none_after,
    the_importers_descriptor_stays_its_own,
    a_hundred_rounds_of_sharing_leave_nothing,
);

const PATIENCE: Duration = Duration::from_secs(60);

fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

fn receive(backend: &Backend, socket: &UnixStream) -> VirtualMemoryBuffer {
    ipc::receive_buffer(socket, &backend.shareable(), &Limits::default(), deadline()).unwrap()
}

/// Waits until the other process kills this one, or is gone.
fn wait_for_the_end(mut socket: &UnixStream) {
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let _ = socket.read(&mut [0]);
}

/// A buffer of three chunks, of 1, 2 and 1 granules, that holds marks of that seed.
fn three_chunks(resource: &VirtualMemoryResource, seed: u8) -> VirtualMemoryBuffer {
    let buffer = resource.allocate_with_capacity(G, 8 * G).unwrap().grow_into(3 * G).unwrap().grow_into(4 * G).unwrap();
    write_marks(&buffer, seed);
    buffer
}

fn an_importer_that_is_killed_holds_nothing_up(backend: &Backend) {
    if let Some((_, socket)) = Peer::role() {
        let buffer = receive(backend, &socket);
        write_marks(&buffer, 2);
        Peer::signal(&socket);
        wait_for_the_end(&socket);
        return;
    }
    let before = backend.mark();
    let buffer = three_chunks(&backend.shareable(), 1);
    let peer = Peer::start(backend, "importer");
    ipc::send_buffer(&peer.socket, &buffer, deadline()).unwrap();
    Peer::await_signal(&peer.socket);
    peer.kill();
    require_marks(&buffer, 2, 4 * G);
    let grown = buffer.grow(5 * G).unwrap();
    grown.close().unwrap();
    buffer.close().unwrap();
    backend.require_unchanged(&before);
}

fn memory_outlives_the_process_that_exported_it(backend: &Backend) {
    if let Some((_, socket)) = Peer::role() {
        let buffer = three_chunks(&backend.shareable(), 3);
        ipc::send_buffer(&socket, &buffer, deadline()).unwrap();
        wait_for_the_end(&socket);
        return;
    }
    let peer = Peer::start(backend, "exporter");
    let buffer = receive(backend, &peer.socket);
    peer.kill();
    require_marks(&buffer, 3, 4 * G);
    write_marks(&buffer, 4);
    let grown = buffer.grow(5 * G).unwrap();
    require_marks(&grown, 4, 4 * G);
    grown.close().unwrap();
    buffer.close().unwrap();
}

fn memory_outlives_the_process_that_exported_it_and_ended(backend: &Backend) {
    if let Some((_, socket)) = Peer::role() {
        let buffer = three_chunks(&backend.shareable(), 3);
        let descriptor = export(&buffer).unwrap();
        buffer.close().unwrap();
        ipc::send(&socket, &descriptor, deadline()).unwrap();
        // The memory is still there, by the other process: so this one just ends.
        std::process::exit(0);
    }
    let peer = Peer::start(backend, "exporter");
    let descriptor = ipc::receive(&peer.socket, &Limits::default(), deadline()).unwrap();
    peer.join_early();
    // Nobody maps it now: the descriptor alone keeps it.
    let resource = backend.shareable();
    let one = import_from(&resource, &descriptor).unwrap();
    require_marks(&one, 3, 4 * G);
    one.close().unwrap();
    let two = import(&resource, descriptor).unwrap();
    require_marks(&two, 3, 4 * G);
    two.close().unwrap();
}

fn two_processes_write_to_each_other(backend: &Backend) {
    const ROUNDS: u8 = 8;
    if let Some((_, socket)) = Peer::role() {
        let buffer = receive(backend, &socket);
        for round in 0..ROUNDS {
            Peer::await_signal(&socket);
            require_marks(&buffer, round, 4 * G);
            write_marks(&buffer, 100 + round);
            Peer::signal(&socket);
        }
        buffer.close().unwrap();
        return;
    }
    let buffer = three_chunks(&backend.shareable(), 50);
    let peer = Peer::start(backend, "importer");
    ipc::send_buffer(&peer.socket, &buffer, deadline()).unwrap();
    for round in 0..ROUNDS {
        write_marks(&buffer, round);
        Peer::signal(&peer.socket);
        Peer::await_signal(&peer.socket);
        require_marks(&buffer, 100 + round, 4 * G);
    }
    peer.join();
    buffer.close().unwrap();
}

fn a_descriptor_keeps_the_memory_of_a_buffer_that_is_closed(backend: &Backend) {
    let resource = backend.shareable();
    let buffer = three_chunks(&resource, 5);
    let descriptor = export(&buffer).unwrap();
    buffer.close().unwrap();
    let mark = backend.mark();
    if let Some(simulator) = &backend.simulator {
        assert_eq!(simulator.physical_bytes(0), 4 * G);
    }
    let alias = import_from(&resource, &descriptor).unwrap();
    require_marks(&alias, 5, 4 * G);
    alias.close().unwrap();
    backend.require_unchanged(&mark);
    drop(descriptor);
    if let Some(simulator) = &backend.simulator {
        // Another test may begin a process meanwhile, which has the handles until it executes its program.
        assert!(simulator.wait_released(after(Duration::from_secs(30))));
        assert_eq!(simulator.physical_bytes(0), 0);
    }
}

fn a_descriptor_keeps_the_memory_of_a_buffer_that_grew(backend: &Backend) {
    let resource = backend.shareable();
    let buffer = three_chunks(&resource, 5);
    let descriptor = export(&buffer).unwrap();
    let occupied = occupy_behind(&buffer);
    let grown = buffer.grow_into(ROOM + G).unwrap();
    drop(occupied);
    let alias = import(&resource, descriptor).unwrap();
    assert_eq!(alias.size(), 4 * G);
    write_marks(&alias, 6);
    require_marks(&grown, 6, 4 * G);
    grown.close().unwrap();
    require_marks(&alias, 6, 4 * G);
    alias.close().unwrap();
}

fn an_import_in_the_exporting_process_is_an_alias(backend: &Backend) {
    let resource = backend.shareable();
    let buffer = three_chunks(&resource, 7);
    let alias = import(&resource, export(&buffer).unwrap()).unwrap();
    assert_ne!(alias.address(), buffer.address());
    assert_eq!(alias.chunks().iter().map(|chunk| chunk.size).collect::<Vec<_>>(), [G, 2 * G, G]);
    require_marks(&alias, 7, 4 * G);
    buffer.copy_from_host(G - 20, &pattern(1, 40)).unwrap();
    let mut seen = vec![0; 40];
    alias.copy_to_host(G - 20, &mut seen).unwrap();
    assert_eq!(seen, pattern(1, 40));
    write_marks(&alias, 8);
    require_marks(&buffer, 8, 4 * G);
    buffer.close().unwrap();
    require_marks(&alias, 8, 4 * G);
    alias.close().unwrap();
}

fn each_import_is_a_buffer_of_its_own(backend: &Backend) {
    let resource = backend.shareable();
    let descriptor = export(&three_chunks(&resource, 9)).unwrap();
    let imports: Vec<_> = (0..3).map(|_| import_from(&resource, &descriptor).unwrap()).collect();
    drop(descriptor);
    let [one, two, three] = <[VirtualMemoryBuffer; 3]>::try_from(imports).unwrap();
    assert!(one.address() != two.address() && two.address() != three.address() && one.address() != three.address());
    one.close().unwrap();
    write_marks(&two, 10);
    two.close().unwrap();
    require_marks(&three, 10, 4 * G);
    three.close().unwrap();
}

fn two_exports_of_one_buffer_have_one_id_and_different_files(backend: &Backend) {
    use std::os::fd::AsRawFd;
    let buffer = three_chunks(&backend.shareable(), 9);
    let (one, two) = (export(&buffer).unwrap(), export(&buffer).unwrap());
    assert!(one.id().is_some());
    assert_eq!(one.id(), two.id());
    let numbers: Vec<i32> = one.fds().chain(two.fds()).map(|fd| fd.as_raw_fd()).collect();
    let mut distinct = numbers.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!((numbers.len(), distinct.len()), (6, 6));
    buffer.close().unwrap();
}

fn another_buffer_has_another_id_also_at_the_same_address(backend: &Backend) {
    let resource = backend.shareable();
    let mut ids = Vec::new();
    for _ in 0..4 {
        let buffer = resource.allocate(G).unwrap();
        ids.push(export(&buffer).unwrap().id().unwrap());
        let grown = buffer.grow(2 * G).unwrap();
        let id = export(&grown).unwrap().id().unwrap();
        assert_eq!(id.family(), ids.last().unwrap().family());
        assert!(id.generation() > ids.last().unwrap().generation());
        grown.close().unwrap();
        buffer.close().unwrap();
    }
    ids.sort_unstable();
    ids.dedup_by_key(|id| id.family());
    assert_eq!(ids.len(), 4);
}

fn every_chunk_of_a_grown_buffer_is_exported_in_order(backend: &Backend) {
    let resource = backend.shareable();
    let buffer = resource.allocate(G).unwrap().grow_into(2 * G).unwrap();
    let occupied = occupy_behind(&buffer);
    let buffer = buffer.grow_into(ROOM + G).unwrap();
    drop(occupied);
    for (seed, chunk) in buffer.chunks().iter().enumerate() {
        let offset = (chunk.address.0 - buffer.address().0) as usize;
        buffer.copy_from_host(offset, &pattern(seed as u8, 4096)).unwrap();
    }
    let descriptor = export(&buffer).unwrap();
    assert_eq!(descriptor.sizes(), [G, G, ROOM - G]);
    assert_eq!((descriptor.size(), descriptor.fds().len()), (ROOM + G, 3));
    assert_eq!(descriptor.device_uuid(), Some(backend.device.uuid().unwrap()));
    let alias = import(&resource, descriptor).unwrap();
    for (seed, offset) in [(0, 0), (1, G), (2, 2 * G)] {
        let mut seen = vec![0; 4096];
        alias.copy_to_host(offset, &mut seen).unwrap();
        assert!(seen == pattern(seed, 4096), "chunk {seed}");
    }
    alias.close().unwrap();
    buffer.close().unwrap();
}

fn what_is_imported_is_not_exported_again(backend: &Backend) {
    let resource = backend.shareable();
    let descriptor = export(&three_chunks(&resource, 1)).unwrap();
    let alias = import(&resource, descriptor).unwrap();
    // Nor what was grown from it, though its last chunk is our own.
    let grown = alias.grow(6 * G).unwrap();
    backend.require_no_call(|| {
        assert!(matches!(export(&alias), Err(Error::Imported { chunk: 0 })));
        assert!(matches!(export(&grown), Err(Error::Imported { chunk: 0 })));
        let kinds = [&alias, &grown].map(|buffer| buffer.export_kinds());
        assert_eq!(kinds, [CUmemAllocationHandleType::NONE; 2]);
    });
    grown.close().unwrap();
    alias.close().unwrap();
}

fn what_is_imported_grows_and_keeps_its_bytes(backend: &Backend) {
    let resource = backend.shareable();
    let original = three_chunks(&resource, 1);
    let alias = import(&resource, export(&original).unwrap()).unwrap();
    let grown = alias.grow(ROOM + G).unwrap();
    require_marks(&grown, 1, 4 * G);
    let occupied = occupy_behind(&grown);
    let moved = grown.grow(grown.capacity() + G).unwrap();
    drop(occupied);
    require_marks(&moved, 1, 4 * G);
    write_marks(&original, 2);
    require_marks(&moved, 2, 4 * G);
    for buffer in [original, alias, moved, grown] {
        buffer.close().unwrap();
    }
}

fn an_empty_buffer_is_shared_without_a_call(backend: &Backend) {
    let resource = backend.shareable();
    let buffer = resource.allocate(0).unwrap();
    let descriptor = export(&buffer).unwrap();
    assert_eq!((descriptor.size(), descriptor.fds().len()), (0, 0));
    let before = backend.ledger.calls().len();
    let alias = import(&resource, descriptor).unwrap();
    let calls = backend.ledger.calls().split_off(before);
    assert!(!calls.contains(&Call::cuMemImportFromShareableHandle));
    assert!(!calls.contains(&Call::cuMemAddressReserve), "{calls:?}");
    assert!(alias.is_empty());
    let grown = alias.grow(G).unwrap();
    write_marks(&grown, 1);
    // It is our own memory.
    assert_eq!(export(&grown).unwrap().sizes(), [G]);
    grown.close().unwrap();
    alias.close().unwrap();
}

fn no_file_is_open_before_the_export_and_none_after(backend: &Backend) {
    Peer::alone(backend, || {
        let resource = backend.shareable();
        import(&resource, export(&resource.allocate(G).unwrap()).unwrap()).unwrap().close().unwrap();
        let buffer = resource.allocate(G).unwrap();
        write_marks(&buffer, 1);
        let files = open_files();
        let grown = buffer.grow(4 * G).unwrap();
        if backend.is_gpu() {
            assert_eq!(open_files(), files, "memory that may be exported needs no file until it is");
        }
        let with_memory = open_files();
        for _ in 0..10 {
            let descriptor = export(&grown).unwrap();
            assert_eq!(open_files().len(), with_memory.len() + 2);
            drop(descriptor);
            let alias = import(&resource, export(&grown).unwrap()).unwrap();
            require_marks(&alias, 1, G);
            alias.close().unwrap();
        }
        assert_eq!(open_files(), with_memory);
        grown.close().unwrap();
        assert_eq!(open_files(), files);
        buffer.close().unwrap();
    });
}

fn the_importers_descriptor_stays_its_own(backend: &Backend) {
    let resource = backend.shareable();
    let buffer = three_chunks(&resource, 1);
    let descriptor = export(&buffer).unwrap();
    let alias = import_from(&resource, &descriptor).unwrap();
    // Importing took none of the files, and closing them takes none of the memory.
    let (_, files) = descriptor.into_parts().unwrap();
    for file in &files {
        nix::fcntl::fcntl(file, nix::fcntl::FcntlArg::F_GETFD).unwrap();
    }
    for file in files {
        std::os::fd::OwnedFd::try_clone(&file).unwrap();
    }
    require_marks(&alias, 1, 4 * G);
    alias.close().unwrap();
    buffer.close().unwrap();
}

fn a_hundred_rounds_of_sharing_leave_nothing(backend: &Backend) {
    Peer::alone(backend, || {
        let resource = backend.shareable();
        import(&resource, export(&resource.allocate(G).unwrap()).unwrap()).unwrap().close().unwrap();
        let (mark, files) = (backend.mark(), open_files());
        for _ in 0..100 {
            let buffer = resource.allocate(ROOM).unwrap();
            let alias = import(&resource, export(&buffer).unwrap()).unwrap();
            drop(buffer);
            alias.close().unwrap();
        }
        backend.require_unchanged(&mark);
        assert_eq!(open_files(), files);
    });
}
