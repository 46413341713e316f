//! Export and import of a buffer of one chunk and of many, each beside the driver's calls for it; and a descriptor of one
//! chunk on its way to another process.
//!
//! # Safety
//! What the raw calls name was made just before, is used by nobody else, and goes once.
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use cuvmm::driver::sys::CUmemGenericAllocationHandle;
use cuvmm::ipc::{export, import_from, receive, send};
use cuvmm::{Device, HandleKind, Limits, Options, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::{G, RawBuffer, Times, compare};

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
    let device = bench.device.clone();
    let raw = Handles::of(&device, &buffer);
    let (ours, theirs) = compare(ROUNDS, || timed(|| export(&buffer).unwrap()).0, || timed(|| raw.export()).0);
    bench.rows.add(exports, "cuvmm", &ours);
    bench.rows.add(exports, "raw", &theirs);
    let descriptor = export(&buffer).unwrap();
    let ours = || timed(|| import_from(resource, &descriptor).unwrap()).0;
    let theirs = || {
        let (took, imported) = timed(|| {
            let mut imported = RawBuffer::reserve(&device, chunks * G);
            descriptor.fds().for_each(|file| imported.import(file, G));
            imported
        });
        imported.finish();
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

/// References to the chunks of a buffer, and the driver's call that exports them.
struct Handles {
    device: Device,
    handles: Vec<CUmemGenericAllocationHandle>,
}

impl Handles {
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
}

impl Drop for Handles {
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
