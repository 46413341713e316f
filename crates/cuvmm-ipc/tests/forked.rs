//! Sharing in a forked child, which shares nothing.
//!
//! # Safety
//! A child that is forked here is refused what it asks for, and ends by `_exit`: it needs nothing that another thread
//! could have held. Its allocator is the C library's, which `fork` leaves usable.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

#[path = "support/simulated.rs"]
mod simulated;
mod support;

use cuvmm_ipc::{Error, HostId, Limits, export, import, import_from, receive_buffer, send_buffer};
use simulated::{Bench, G};
use support::{pair, soon};

unsafe extern "C" {
    safe fn fork() -> i32;
    safe fn alarm(seconds: u32) -> u32;
    safe fn _exit(status: i32) -> !;
    unsafe fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
}

#[test]
fn a_forked_child_is_refused_and_touches_no_socket() {
    let bench = Bench::small();
    let resource = bench.shareable();
    let buffer = resource.allocate(G).unwrap();
    let descriptors = [(); 2].map(|()| export(&buffer).unwrap());
    let (ours, theirs) = pair();
    theirs.set_nonblocking(true).unwrap();
    let host = HostId::current();
    let child = fork();
    if child == 0 {
        alarm(10);
        let [one, other] = descriptors;
        let limits = Limits::default();
        let refused = [
            export(&buffer).map(drop),
            send_buffer(&ours, &buffer, soon()),
            receive_buffer(&ours, &resource, &limits, soon()).map(drop),
            import_from(&resource, &one).map(drop),
            import(&resource, other).map(drop),
        ];
        let is_forked = |result| matches!(result, Err(Error::Driver(cuvmm_driver::Error::Forked)));
        _exit(i32::from(!refused.into_iter().all(is_forked) || HostId::current() != host));
    }
    assert!(child > 0, "a child");
    let mut status = -1;
    // SAFETY: the output is ours.
    assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    let nothing = std::io::Read::read(&mut &theirs, &mut [0]).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
    for descriptor in descriptors {
        import(&resource, descriptor).unwrap().close().unwrap();
    }
    buffer.close().unwrap();
}
