//! Every driver call of exporting and importing made to fail, before its effect and after it.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use cuvmm::ipc::{Error, export, import, import_from};
use cuvmm::{BufferDescriptor, CUresult, Call, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::faults::When;
use cuvmm_tests::matrix::codes;
use cuvmm_tests::{Backend, G, Left, Peer, Step, open_files, require_marks, steps, write_marks};

cuvmm_tests::suite!(
    a_failed_call_of_export_leaves_nothing,
    a_failed_call_of_import_leaves_nothing,
    a_failed_call_of_the_first_import_leaves_nothing,
    what_export_made_before_it_failed_is_all_that_is_lost,
    what_a_call_of_import_made_before_it_failed_is_all_that_is_lost,
    the_first_error_of_import_is_told_when_cleaning_up_fails_too,
);

/// A buffer of three chunks of different sizes that holds marks 3.
fn three_chunks(resource: &VirtualMemoryResource) -> VirtualMemoryBuffer {
    let buffer = resource.allocate_with_capacity(G, 8 * G).unwrap();
    let buffer = buffer.grow_into(3 * G).unwrap().grow_into(4 * G).unwrap();
    write_marks(&buffer, 3);
    assert_eq!(buffer.chunks().iter().map(|chunk| chunk.size).collect::<Vec<_>>(), [G, 2 * G, G]);
    buffer
}

#[track_caller]
fn require_error(error: &Error, step: Step, code: CUresult) {
    assert_eq!((error.call(), error.code()), (Some(step.call), Some(code)), "{step:?}: {error}");
}

fn a_failed_call_of_export_leaves_nothing(backend: &Backend) {
    Peer::alone(backend, || {
        let resource = backend.shareable();
        let buffer = three_chunks(&resource);
        drop(export(&buffer).unwrap());
        let (calls, descriptor) = steps(backend, || export(&buffer).unwrap());
        assert_eq!(calls.len(), 3, "a handle of each chunk: {calls:?}");
        drop(descriptor);
        let files = open_files();
        for step in calls {
            for code in codes(step.call) {
                let mark = backend.mark();
                backend.faults.fail(step.call, step.nth, code, When::Before);
                require_error(&export(&buffer).unwrap_err(), step, code);
                backend.faults.clear();
                backend.require_unchanged(&mark);
                assert_eq!(open_files(), files);
            }
        }
        // It can be exported, grown and closed as before.
        let alias = import(&resource, export(&buffer).unwrap()).unwrap();
        require_marks(&alias, 3, 4 * G);
        buffer.grow(5 * G).unwrap().close().unwrap();
        alias.close().unwrap();
        buffer.close().unwrap();
    });
}

fn a_failed_call_of_import_leaves_nothing(backend: &Backend) {
    Peer::alone(backend, || {
        let resource = backend.shareable();
        let buffer = three_chunks(&resource);
        let descriptor = export(&buffer).unwrap();
        import_from(&resource, &descriptor).unwrap().close().unwrap();
        let (calls, alias) = steps(backend, || import_from(&resource, &descriptor).unwrap());
        assert!(calls.len() > 9, "{calls:?}");
        alias.close().unwrap();
        let files = open_files();
        for step in calls {
            for code in codes(step.call) {
                let mark = backend.mark();
                backend.faults.fail(step.call, step.nth, code, When::Before);
                require_error(&import_from(&resource, &descriptor).unwrap_err(), step, code);
                // The same with a descriptor that goes: its files are closed.
                backend.faults.clear();
                let copy = descriptor.try_clone().unwrap();
                backend.faults.fail(step.call, step.nth, code, When::Before);
                require_error(&import(&resource, copy).unwrap_err(), step, code);
                backend.faults.clear();
                backend.require_unchanged(&mark);
                assert_eq!(open_files(), files);
            }
        }
        let alias = import(&resource, descriptor).unwrap();
        require_marks(&alias, 3, 4 * G);
        alias.close().unwrap();
        buffer.close().unwrap();
    });
}

fn a_failed_call_of_the_first_import_leaves_nothing(backend: &Backend) {
    let import_of = |descriptor: &BufferDescriptor| {
        // A driver that has imported nothing yet.
        let fresh = backend.another();
        let resource = fresh.shareable();
        let copy = descriptor.try_clone().unwrap();
        (fresh, resource, copy)
    };
    let resource = backend.shareable();
    let buffer = three_chunks(&resource);
    let descriptor = export(&buffer).unwrap();
    let (fresh, other, copy) = import_of(&descriptor);
    let (calls, alias) = steps(&fresh, || import(&other, copy).unwrap());
    alias.close().unwrap();
    assert!(calls.len() > 13, "{calls:?}");
    for step in calls {
        let (fresh, resource, copy) = import_of(&descriptor);
        let mark = fresh.mark();
        fresh.faults.fail(step.call, step.nth, CUresult::UNKNOWN, When::Before);
        let error = import(&resource, copy).unwrap_err();
        fresh.faults.clear();
        require_error(&error, step, CUresult::UNKNOWN);
        if step.call == Call::cuMemRelease {
            // What finds out about handles releases its import of the memory that it made for that, and the memory.
            let imported = usize::from(step.nth == 1);
            let left = Left { allocations: 1, imported, stranded: 1, bytes: Some(G), ..Left::default() };
            fresh.require_left(&mark, left);
        } else {
            fresh.require_unchanged(&mark);
        }
        fresh.finish();
    }
    require_marks(&buffer, 3, 4 * G);
    buffer.close().unwrap();
}

fn what_export_made_before_it_failed_is_all_that_is_lost(backend: &Backend) {
    Peer::alone(backend, || {
        let resource = backend.shareable();
        let buffer = three_chunks(&resource);
        drop(export(&buffer).unwrap());
        for nth in 1..=3 {
            let files = open_files();
            let mark = backend.mark();
            backend.faults.fail(Call::cuMemExportToShareableHandle, nth, CUresult::UNKNOWN, When::After);
            let error = export(&buffer).unwrap_err();
            backend.faults.clear();
            require_error(&error, Step { call: Call::cuMemExportToShareableHandle, nth }, CUresult::UNKNOWN);
            backend.require_unchanged(&mark);
            let lost: Vec<i32> = open_files().into_iter().filter(|number| !files.contains(number)).collect();
            assert_eq!(lost.len(), 1, "one descriptor is lost");
            nix::unistd::close(lost[0]).unwrap();
        }
        require_marks(&buffer, 3, 4 * G);
        buffer.close().unwrap();
    });
}

fn what_a_call_of_import_made_before_it_failed_is_all_that_is_lost(backend: &Backend) {
    let resource = backend.shareable();
    let buffer = three_chunks(&resource);
    let descriptor = export(&buffer).unwrap();
    import_from(&resource, &descriptor).unwrap().close().unwrap();
    let (calls, alias) = steps(backend, || import_from(&resource, &descriptor).unwrap());
    alias.close().unwrap();
    for step in calls {
        // The memory is the exporter's, which has it still.
        let none = Left { bytes: Some(0), ..Left::default() };
        let left = match step.call {
            Call::cuMemAddressReserve => Left { reservations: 1, ..none },
            Call::cuMemImportFromShareableHandle => Left { allocations: 1, imported: 1, ..none },
            Call::cuMemMap => Left { mappings: 1, reservations: 1, stranded: 1, ..none },
            Call::cuMemSetAccess => none,
            Call::cuMemGetAllocationPropertiesFromHandle | Call::cuDeviceGetUuid => none,
            call => panic!("{call} is not to be made"),
        };
        let mark = backend.mark();
        backend.faults.fail(step.call, step.nth, CUresult::UNKNOWN, When::After);
        let error = import_from(&resource, &descriptor).unwrap_err();
        backend.faults.clear();
        require_error(&error, step, CUresult::UNKNOWN);
        backend.require_left(&mark, left);
    }
    require_marks(&buffer, 3, 4 * G);
    buffer.close().unwrap();
    // Each chunk stays with what was lost of it.
    backend.require_stays(Left { bytes: Some(4 * G), ..Left::default() });
}

fn the_first_error_of_import_is_told_when_cleaning_up_fails_too(backend: &Backend) {
    let resource = backend.shareable();
    let buffer = three_chunks(&resource);
    let descriptor = export(&buffer).unwrap();
    import_from(&resource, &descriptor).unwrap().close().unwrap();
    let mark = backend.mark();
    backend.faults.fail(Call::cuMemMap, 3, CUresult::OUT_OF_MEMORY, When::Before);
    backend.faults.fail(Call::cuMemUnmap, 1, CUresult::UNKNOWN, When::Before);
    let error = import(&resource, descriptor).unwrap_err();
    backend.faults.clear();
    require_error(&error, Step { call: Call::cuMemMap, nth: 3 }, CUresult::OUT_OF_MEMORY);
    let kept = Left { mappings: 1, reservations: 1, stranded: 1, bytes: Some(0), ..Left::default() };
    backend.require_left(&mark, kept);
    let second = buffer.chunks()[1].size;
    buffer.close().unwrap();
    backend.require_stays(Left { bytes: Some(second), ..Left::default() });
}
