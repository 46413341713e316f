//! Export and import of a buffer of one chunk and of many, each beside the driver's calls for it; and a descriptor of one
//! chunk on its way to another process.
//!
//! # Safety
//! What the raw calls name was made just before, is used by nobody else, and goes once.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use cuvmm::driver::sys::{CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemGenericAllocationHandle};
use cuvmm::ipc::{export, import_from, receive, send};
use cuvmm::{Device, HandleKind, Limits, Options, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::{G, Times, compare};

use crate::{Bench, timed};

const ROUNDS: usize = 500;
/// A descriptor of one chunk, from one process to another, until that has said that it has it.
const MOVE: &str = "move/1";
const CHUNKS: [usize; 3] = [1, 8, 64];
/// Names the process that receives.
const RECEIVER: &str = "CUVMM_RECEIVER";
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether this process is the one that receives.
pub(crate) fn is_receiver() -> bool {
    std::env::var_os(RECEIVER).is_some()
}

pub(crate) fn run(bench: &mut Bench) {
    let resource = bench.resource(Options::new().handle_kind(HandleKind::PosixFd));
    for chunks in CHUNKS {
        let cases = ["export", "import"].map(|what| format!("{what}/{chunks}"));
        if cases.iter().any(|case| bench.wants(case)) {
            export_and_import(bench, &resource, chunks, &cases);
        }
    }
    if bench.wants(MOVE) {
        bench.rows.add(MOVE, "cuvmm", &moved(&resource));
    }
}

fn export_and_import(
    bench: &mut Bench,
    resource: &VirtualMemoryResource,
    chunks: usize,
    [exports, imports]: &[String; 2],
) {
    let buffer = buffer_of(resource, chunks);
    let raw = Raw::of(&bench.device, &buffer);
    let (ours, theirs) = compare(ROUNDS, || timed(|| export(&buffer).unwrap()).0, || timed(|| raw.export()).0);
    bench.rows.add(exports, "cuvmm", &ours);
    bench.rows.add(exports, "raw", &theirs);
    let descriptor = export(&buffer).unwrap();
    let ours = || timed(|| import_from(resource, &descriptor).unwrap()).0;
    let theirs = || {
        let (took, imported) = timed(|| raw.import(descriptor.fds()));
        raw.end(imported);
        took
    };
    let (ours, theirs) = compare(ROUNDS, ours, theirs);
    bench.rows.add(imports, "cuvmm", &ours);
    bench.rows.add(imports, "raw", &theirs);
}

fn buffer_of(resource: &VirtualMemoryResource, chunks: usize) -> VirtualMemoryBuffer {
    let buffer = resource.allocate_with_capacity(G, chunks * G).unwrap();
    (2..=chunks).fold(buffer, |buffer, chunks| buffer.grow_into(chunks * G).unwrap())
}

/// The driver's calls for the chunks of a buffer.
struct Raw {
    device: Device,
    handles: Vec<CUmemGenericAllocationHandle>,
}

/// What the driver's calls imported.
struct Imported {
    address: CUdeviceptr,
    handles: Vec<CUmemGenericAllocationHandle>,
}

impl Raw {
    fn of(device: &Device, buffer: &VirtualMemoryBuffer) -> Self {
        // SAFETY: the buffer is mapped there, and outlives what refers to it here.
        let retain = |address| unsafe { device.driver().mem_retain_allocation_handle(address) }.unwrap();
        let handles = buffer.chunks().into_iter().map(|chunk| retain(chunk.address)).collect();
        Self { device: device.clone(), handles }
    }

    fn export(&self) -> Vec<OwnedFd> {
        // SAFETY: the handles are references of ours.
        self.handles
            .iter()
            .map(|&handle| unsafe { self.device.driver().mem_export_posix_fd(handle) }.unwrap())
            .collect()
    }

    fn import<'f>(&self, files: impl ExactSizeIterator<Item = std::os::fd::BorrowedFd<'f>>) -> Imported {
        let (driver, location) = (self.device.driver(), self.device.location());
        let access = CUmemAccessDesc { location, flags: CUmemAccess_flags::READWRITE };
        let address = driver.mem_address_reserve(files.len() * G, 0, CUdeviceptr(0)).unwrap();
        let mut handles = Vec::with_capacity(files.len());
        for (chunk, file) in files.enumerate() {
            let at = CUdeviceptr(address.0 + (chunk * G) as u64);
            let handle = driver.mem_import_posix_fd(file.as_fd()).unwrap();
            // SAFETY: the handle was made just now.
            let properties = unsafe { driver.mem_get_allocation_properties(handle) }.unwrap();
            assert_eq!(properties.location, location);
            // SAFETY: the addresses are reserved, and nothing is mapped there.
            unsafe { driver.mem_map(at, G, handle) }.unwrap();
            // SAFETY: it was mapped just now.
            unsafe { driver.mem_set_access(at, G, &[access]) }.unwrap();
            handles.push(handle);
        }
        Imported { address, handles }
    }

    fn end(&self, imported: Imported) {
        let (driver, size) = (self.device.driver(), imported.handles.len() * G);
        for (chunk, handle) in imported.handles.into_iter().enumerate() {
            // SAFETY: it is mapped there, and no work uses it.
            unsafe { driver.mem_unmap(CUdeviceptr(imported.address.0 + (chunk * G) as u64), G) }.unwrap();
            // SAFETY: the handle is ours.
            unsafe { driver.mem_release(handle) }.unwrap();
        }
        // SAFETY: nothing is mapped there any more.
        unsafe { driver.mem_address_free(imported.address, size) }.unwrap();
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        for &handle in &self.handles {
            // SAFETY: the references are ours.
            unsafe { self.device.driver().mem_release(handle) }.unwrap();
        }
    }
}

/// Sends a descriptor of one chunk to another process, again and again, each time until that has said that it has it.
fn moved(resource: &VirtualMemoryResource) -> Times {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let program = std::env::current_exe().unwrap();
    let mut receiver = Command::new(program).env(RECEIVER, "1").stdin(OwnedFd::from(theirs)).spawn().unwrap();
    let descriptor = export(&resource.allocate(G).unwrap()).unwrap();
    let times = Times::of(ROUNDS, || timed(|| send(&ours, &descriptor, Instant::now() + PATIENCE).unwrap()).0);
    drop(ours);
    assert!(receiver.wait().unwrap().success());
    times
}

/// What the receiving process does: it takes what comes, until its peer is gone.
pub(crate) fn take_all() {
    let input = std::io::stdin();
    loop {
        match receive(&input, &Limits::default(), Instant::now() + PATIENCE) {
            Ok(descriptor) => assert_eq!(descriptor.sizes(), [G]),
            Err(cuvmm::ipc::Error::Closed { .. }) => return,
            Err(error) => panic!("{error}"),
        }
    }
}
