//! Descriptors that lie get a typed error, and leave nothing.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs::File;
use std::os::fd::OwnedFd;

use cuvmm::driver::sys::{CUmemAllocationHandleType, CUuuid};
use cuvmm::ipc::{Error, HostId, Location, Metadata, export, import};
use cuvmm::{BufferDescriptor, CUresult, Call, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::{Backend, G, Peer, open_files, require_marks, write_marks};

cuvmm_tests::suite!(
    a_size_that_is_not_true_is_refused_by_the_map,
    sizes_in_another_order_are_refused_by_the_map,
    a_size_of_no_granules_is_refused_before_the_memory_is_asked_for,
    another_device_is_refused_before_the_memory_is_asked_for,
    another_kind_of_handle_is_refused_before_the_memory_is_asked_for,
    another_host_is_refused_before_the_memory_is_asked_for,
    another_number_of_handles_is_no_descriptor,
    a_file_of_another_kind_never_reaches_the_driver,
    a_file_that_is_no_handle_is_refused,
    one_handle_for_all_chunks_gives_aliases_of_one_chunk,
);

/// A buffer of 1, 2 and 1 granules that holds marks 1.
fn three_chunks(resource: &VirtualMemoryResource) -> VirtualMemoryBuffer {
    let buffer = resource.allocate_with_capacity(G, 8 * G).unwrap().grow_into(3 * G).unwrap().grow_into(4 * G).unwrap();
    write_marks(&buffer, 1);
    buffer
}

fn lie(buffer: &VirtualMemoryBuffer, change: impl FnOnce(&mut Metadata, &mut Vec<OwnedFd>)) -> BufferDescriptor {
    let (mut metadata, mut files) = export(buffer).unwrap().into_parts().unwrap();
    change(&mut metadata, &mut files);
    BufferDescriptor::new(metadata, files).unwrap()
}

/// Imports lies in a process of their own, and demands that each is refused as it should be and leaves nothing: no
/// file, no memory, and a buffer as it was.
fn refuse(
    backend: &Backend,
    lies: &[fn(&mut Metadata, &mut Vec<OwnedFd>)],
    expect: fn(&Error) -> bool,
    before_the_import: bool,
) {
    Peer::alone(backend, || {
        let resource = backend.shareable();
        let buffer = three_chunks(&resource);
        import(&resource, export(&buffer).unwrap()).unwrap().close().unwrap();
        let (mark, files) = (backend.mark(), open_files());
        for change in lies {
            let descriptor = lie(&buffer, |metadata, files| {
                change(metadata, files);
                // The sizes add up, as they must.
                metadata.size = metadata.sizes.iter().sum();
            });
            let imports = backend.ledger.count(Call::cuMemImportFromShareableHandle);
            let error = import(&resource, descriptor).unwrap_err();
            assert!(expect(&error), "{error:?}");
            let asked = backend.ledger.count(Call::cuMemImportFromShareableHandle) > imports;
            assert!(!(before_the_import && asked), "the driver was asked for the memory: {error}");
            backend.require_unchanged(&mark);
            assert_eq!(open_files(), files);
        }
        require_marks(&buffer, 1, 4 * G);
        let alias = import(&resource, export(&buffer).unwrap()).unwrap();
        require_marks(&alias, 1, 4 * G);
        alias.close().unwrap();
        buffer.close().unwrap();
    });
}

fn is_map(error: &Error) -> bool {
    (error.call(), error.code()) == (Some(Call::cuMemMap), Some(CUresult::NOT_SUPPORTED))
}

fn a_size_that_is_not_true_is_refused_by_the_map(backend: &Backend) {
    let lies: [fn(&mut Metadata, &mut Vec<OwnedFd>); 4] = [
        |metadata, _| metadata.sizes[0] += G,
        |metadata, _| metadata.sizes[2] += G,
        |metadata, _| metadata.sizes[1] -= G,
        |metadata, _| metadata.sizes[2] += 64 * G,
    ];
    refuse(backend, &lies, is_map, false);
}

fn sizes_in_another_order_are_refused_by_the_map(backend: &Backend) {
    refuse(backend, &[|metadata, _| metadata.sizes.swap(0, 1), |_, files| files.swap(1, 2)], is_map, false);
}

fn a_size_of_no_granules_is_refused_before_the_memory_is_asked_for(backend: &Backend) {
    refuse(
        backend,
        &[|metadata, _| metadata.sizes[1] += 4096, |metadata, _| metadata.sizes[2] -= 1],
        |error| matches!(error, Error::ChunkSize { granularity: G, .. }),
        true,
    );
}

fn another_device_is_refused_before_the_memory_is_asked_for(backend: &Backend) {
    refuse(
        backend,
        &[
            |metadata, _| metadata.location = Some(Location::Device { uuid: CUuuid { bytes: [7; 16] } }),
            |metadata, _| metadata.location = Some(Location::HostNuma { node: 0 }),
        ],
        |error| matches!(error, Error::WrongLocation { .. } | Error::HiddenDevice { uuid: Some(_) }),
        true,
    );
}

fn another_kind_of_handle_is_refused_before_the_memory_is_asked_for(backend: &Backend) {
    refuse(
        backend,
        &[
            |metadata, _| metadata.handle_kind = CUmemAllocationHandleType::WIN32,
            |metadata, _| metadata.handle_kind = CUmemAllocationHandleType::NONE,
            |metadata, _| metadata.handle_kind = CUmemAllocationHandleType(1 << 20),
        ],
        |error| matches!(error, Error::WrongHandleKind { .. }),
        true,
    );
}

fn another_host_is_refused_before_the_memory_is_asked_for(backend: &Backend) {
    refuse(
        backend,
        &[|metadata, _| metadata.host = HostId::new([9; 16])],
        |error| matches!(error, Error::WrongHost { .. }),
        true,
    );
}

fn another_number_of_handles_is_no_descriptor(backend: &Backend) {
    let buffer = three_chunks(&backend.shareable());
    let (metadata, mut files) = export(&buffer).unwrap().into_parts().unwrap();
    files.pop();
    backend.require_no_call(|| {
        let error = BufferDescriptor::new(metadata.clone(), files).unwrap_err();
        assert!(matches!(error, Error::HandleCount { handles: 2, chunks: 3 }), "{error:?}");
        for size in [0, 4 * G + 1, usize::MAX] {
            let refused = Metadata::check(&{
                let mut metadata = metadata.clone();
                metadata.size = size;
                metadata
            });
            assert!(refused.is_err(), "{size:#x}");
        }
        let mut metadata = metadata.clone();
        metadata.sizes = vec![usize::MAX - (G - 1); 3];
        assert!(metadata.check().is_err());
    });
    buffer.close().unwrap();
}

fn a_file_of_another_kind_never_reaches_the_driver(backend: &Backend) {
    refuse(
        backend,
        &[
            |_, files| files[0] = File::open("/dev/null").unwrap().into(),
            |_, files| files[1] = std::os::unix::net::UnixStream::pair().unwrap().0.into(),
            |_, files| files[2] = std::io::pipe().unwrap().0.into(),
            |_, files| files[2] = File::open("/").unwrap().into(),
        ],
        |error| matches!(error, Error::WrongFile { .. }),
        true,
    );
}

fn a_file_that_is_no_handle_is_refused(backend: &Backend) {
    fn memory_file() -> OwnedFd {
        nix::sys::memfd::memfd_create(c"no handle", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap()
    }
    refuse(
        backend,
        &[|_, files| files[0] = memory_file(), |_, files| files[2] = memory_file()],
        // Where handles are such files themselves, the driver is asked.
        |error| matches!(error, Error::WrongFile { .. }) || error.code() == Some(CUresult::UNKNOWN),
        false,
    );
}

fn one_handle_for_all_chunks_gives_aliases_of_one_chunk(backend: &Backend) {
    let resource = backend.shareable();
    let buffer = resource.allocate(G).unwrap();
    write_marks(&buffer, 1);
    let (mut metadata, mut files) = export(&buffer).unwrap().into_parts().unwrap();
    files.push(files[0].try_clone().unwrap());
    (metadata.sizes, metadata.size) = (vec![G, G], 2 * G);
    // A peer may do so: it is its own memory twice, and nobody else's.
    let twice = import(&resource, BufferDescriptor::new(metadata, files).unwrap()).unwrap();
    twice.copy_from_host(G + 5, b"seen").unwrap();
    let mut seen = [0; 4];
    twice.copy_to_host(5, &mut seen).unwrap();
    assert_eq!(&seen, b"seen");
    twice.close().unwrap();
    buffer.close().unwrap();
}
