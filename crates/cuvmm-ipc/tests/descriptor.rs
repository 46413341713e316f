//! Descriptors of handles that came by whatever way: what becomes of them, whatever goes wrong.
//!
//! # Safety
//! Numbers that are no open file are made handles of, for the kernel to refuse. Nobody closes them.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/simulated.rs"]
mod simulated;
mod support;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cuvmm_ipc::{BufferDescriptor, Error, HandleFd, Importer, InvalidMetadata, Limits, export, import, send};
use cuvmm_resource::{Release, StreamRef};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use simulated::{Bench, G, leaves_nothing};
use support::{OpenFiles, inode, inodes, memory_file, memory_files, pair, soon};

/// A number that is no open file, and will be none while the test runs: beyond what a process opens by itself.
const NO_FILE: i32 = 1_000_000;

fn is_bad_file(error: &Error) -> bool {
    matches!(error, Error::Os { source, .. } if source.raw_os_error() == Some(nix::errno::Errno::EBADF as i32))
}

#[test]
fn a_borrowed_handle_is_duplicated_an_owned_one_taken_and_a_shared_one_shared() {
    let files = OpenFiles::watch();
    let (borrowed, owned, shared) = (memory_file(), memory_file(), Arc::new(memory_file()));
    let (owned_number, expected) = (owned.as_raw_fd(), [inode(&borrowed), inode(&owned), inode(&*shared)]);
    let handles: [HandleFd<'_>; 3] = [borrowed.as_fd().into(), owned.into(), Arc::clone(&shared).into()];
    let descriptor = BufferDescriptor::from_fds(handles, &[G, G, 2 * G], Some(3 * G + 1)).unwrap();
    assert_eq!(inodes(&descriptor), expected);
    assert_eq!((descriptor.size(), descriptor.sizes()), (3 * G + 1, &[G, G, 2 * G][..]));
    let told = (descriptor.location(), descriptor.device_uuid(), descriptor.id(), descriptor.host());
    assert_eq!(told, (None, None, None, None));
    let numbers: Vec<_> = descriptor.fds().map(|fd| fd.as_raw_fd()).collect();
    assert_ne!(numbers[0], borrowed.as_raw_fd());
    assert_eq!(numbers[1..], [owned_number, shared.as_raw_fd()]);
    let flags = fcntl(descriptor.fds().next().unwrap(), FcntlArg::F_GETFD).unwrap();
    assert!(FdFlag::from_bits_truncate(flags).contains(FdFlag::FD_CLOEXEC));
    descriptor.close();
    assert_eq!([inode(&borrowed), inode(&*shared)], [expected[0], expected[2]], "what is others' stays open");
    drop((borrowed, shared));
    files.assert_unchanged();
}

#[test]
fn what_others_share_is_duplicated_for_who_wants_to_own_it() {
    let files = OpenFiles::watch();
    let (shared, alone) = (Arc::new(memory_file()), Arc::new(memory_file()));
    let numbers = [shared.as_raw_fd(), alone.as_raw_fd()];
    let handles = [Arc::clone(&shared), alone, Arc::clone(&shared)];
    let descriptor = BufferDescriptor::from_fds(handles, &[G; 3], None).unwrap();
    let (_, owned) = descriptor.into_parts().unwrap();
    assert_eq!(owned[1].as_raw_fd(), numbers[1]);
    assert!(owned[0].as_raw_fd() != numbers[0] && owned[2].as_raw_fd() != numbers[0]);
    assert_eq!([inode(&owned[0]), inode(&owned[2])], [inode(&*shared); 2]);
    drop((shared, owned));
    files.assert_unchanged();
}

#[test]
fn sizes_and_counts_that_do_not_fit_are_refused_and_all_is_closed() {
    let files = OpenFiles::watch();
    let check = |handles, sizes: &[usize], size, expect: fn(&Error) -> bool| {
        let error = BufferDescriptor::from_fds(memory_files(handles), sizes, size).unwrap_err();
        assert!(expect(&error), "{handles} {sizes:?} {size:?}: {error:?}");
    };
    check(1, &[G, G], None, |error| matches!(error, Error::HandleCount { handles: 1, chunks: 2 }));
    check(3, &[G, G], None, |error| matches!(error, Error::HandleCount { handles: 3, chunks: 2 }));
    check(2, &[G, 0], None, |error| matches!(error, Error::Metadata(InvalidMetadata::EmptyChunk { chunk: 1 })));
    check(2, &[usize::MAX, 1], None, |error| matches!(error, Error::Metadata(InvalidMetadata::SumOverflow { .. })));
    for size in [0, 2 * G + 1] {
        check(2, &[G, G], Some(size), |error| matches!(error, Error::Metadata(InvalidMetadata::Size { .. })));
    }
    check(0, &[], Some(1), |error| matches!(error, Error::Metadata(InvalidMetadata::Size { size: 1, sum: 0 })));
    for size in [None, Some(0)] {
        assert_eq!(BufferDescriptor::from_fds(Vec::<OwnedFd>::new(), &[], size).unwrap().size(), 0);
    }
    files.assert_unchanged();
}

/// In whichever way the number comes, and wherever it stands: what came with it is closed, and the number is not.
#[test]
fn a_number_that_is_no_open_file_is_refused_and_not_closed() {
    let files = OpenFiles::watch();
    // SAFETY: nothing is asked of it but what the kernel refuses.
    let borrowed = || HandleFd::Borrowed(unsafe { BorrowedFd::borrow_raw(NO_FILE) });
    // SAFETY: as before; a descriptor that closed it would abort the test.
    let owned = || unsafe { OwnedFd::from_raw_fd(NO_FILE) };
    let bad: [&dyn Fn() -> HandleFd<'static>; 3] =
        [&borrowed, &|| HandleFd::Owned(owned()), &|| HandleFd::Shared(Arc::new(owned()))];
    let good = memory_file();
    for (way, bad) in bad.into_iter().enumerate() {
        for at in 0..4 {
            let handles = (0..4).map(|nth| if nth == at { bad() } else { good.as_fd().into() });
            let error = BufferDescriptor::from_fds(handles, &[G; 4], None).unwrap_err();
            assert!(is_bad_file(&error), "{way} {at}: {error:?}");
        }
        let error = BufferDescriptor::from_fds([bad(), bad()], &[G; 2], None).unwrap_err();
        assert!(is_bad_file(&error), "{way}: {error:?}");
    }
    drop(good);
    files.assert_unchanged();
}

#[test]
fn handles_alone_are_imported_for_the_importers_own_device() {
    leaves_nothing(|_, resource| {
        let buffer = resource.allocate(G).unwrap();
        buffer.copy_from_host(0, b"told by size alone").unwrap();
        let exported = export(&buffer).unwrap();
        let imported = import(resource, BufferDescriptor::from_fds(exported.fds(), &[G], None).unwrap()).unwrap();
        let mut text = [0; 18];
        imported.copy_to_host(0, &mut text).unwrap();
        assert_eq!(&text, b"told by size alone");
    });
}

#[test]
fn an_imported_buffer_waits_for_the_stream_that_its_importer_was_given() {
    leaves_nothing(|_, resource| {
        let stream = StreamRef::create(resource.device()).unwrap();
        let descriptor = export(&resource.allocate(G).unwrap()).unwrap();
        let importer = Importer::new(resource).release(Release::Stream(stream.clone()));
        for _ in 0..2 {
            let imported = importer.import_from(&descriptor).unwrap();
            assert!(matches!(imported.released_after(), Release::Stream(given) if given == stream));
        }
        let (ours, theirs) = pair();
        let sent = std::thread::spawn(move || send(theirs, &descriptor, soon()));
        let received = importer.receive(&ours, &Limits::default(), soon()).unwrap();
        sent.join().unwrap().unwrap();
        assert!(matches!(received.released_after(), Release::Stream(given) if given == stream));
    });
}

#[test]
fn a_release_stream_of_another_driver_is_refused_before_any_call() {
    leaves_nothing(|bench, resource| {
        let other = Bench::small();
        let descriptor = export(&resource.allocate(G).unwrap()).unwrap();
        let stream = StreamRef::create(other.shareable().device()).unwrap();
        bench.simulator.clear_calls();
        let error = Importer::new(resource).release(Release::Stream(stream)).import_from(&descriptor).unwrap_err();
        assert!(matches!(error, Error::Driver(cuvmm_driver::Error::DifferentDrivers)), "{error:?}");
        assert_eq!(bench.simulator.calls(), []);
    });
}
