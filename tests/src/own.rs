//! The operations whose own cost is measured, each by the number of chunks, on a driver whose calls do nothing: for how long
//! they take, and how many instructions that is.

use cuvmm::ipc::{export, import_from};
use cuvmm::{Driver, HandleKind, Options, Outcome, Release, VirtualMemoryBuffer, VirtualMemoryResource};

use crate::Nothing;

/// The size of a chunk: that of the least reservation, which so has no room to spare.
const CHUNK: usize = 32 << 20;

/// Does an operation once, prepared before and cleaned up after, neither of which is measured: what is measured it hands to
/// its argument, which has to call it once.
pub type Repeat = Box<dyn FnMut(&mut dyn FnMut(&mut dyn FnMut()))>;

/// What prepares to repeat an operation with buffers of so many chunks.
pub type Prepare = fn(usize) -> Repeat;

/// The name of each operation, and how it is prepared.
pub const OPERATIONS: [(&str, Prepare); 10] = [
    ("allocate", allocate),
    ("allocate-chunks", allocate_chunks),
    ("grow-in-place", |chunks| grow(Nothing::granting(), chunks, 1, Outcome::InPlace)),
    // By a reservation behind.
    ("grow-behind", |chunks| grow(Nothing::granting(), chunks, 0, Outcome::InPlace)),
    ("grow-into", grow_into),
    ("covered", covered),
    ("grow-move", |chunks| grow(Nothing::elsewhere(), chunks, 0, Outcome::Moved)),
    ("close", close),
    ("export", exported),
    ("import", imported),
];

fn resource_on(driver: Nothing, options: Options) -> VirtualMemoryResource {
    let device = Driver::new(driver).unwrap().device(0).unwrap();
    VirtualMemoryResource::new(&device, options.release(Release::Caller)).unwrap()
}

/// A buffer of that many chunks, which were added one by one, with room for some more.
fn chain(resource: &VirtualMemoryResource, chunks: usize, room: usize) -> VirtualMemoryBuffer {
    let buffer = resource.allocate_with_capacity(CHUNK, (chunks + room) * CHUNK).unwrap();
    (2..=chunks).fold(buffer, |buffer, chunks| buffer.grow_into(chunks * CHUNK).unwrap())
}

/// Has an operation measured, and gives what it made.
fn measured<T>(measure: &mut dyn FnMut(&mut dyn FnMut()), mut operation: impl FnMut() -> T) -> T {
    let mut made = None;
    measure(&mut || made = Some(operation()));
    made.unwrap()
}

/// Of one chunk, while another buffer of the resource has so many.
fn allocate(chunks: usize) -> Repeat {
    let resource = resource_on(Nothing::granting(), Options::new());
    let beside = chain(&resource, chunks, 0);
    Box::new(move |measure| {
        measured(measure, || resource.allocate(CHUNK).unwrap()).close().unwrap();
        assert_eq!(beside.size(), chunks * CHUNK);
    })
}

fn allocate_chunks(chunks: usize) -> Repeat {
    let resource = resource_on(Nothing::granting(), Options::new().max_chunk(CHUNK));
    Box::new(move |measure| measured(measure, || resource.allocate(chunks * CHUNK).unwrap()).close().unwrap())
}

fn grow(driver: Nothing, chunks: usize, room: usize, outcome: Outcome) -> Repeat {
    let buffer = chain(&resource_on(driver, Options::new()), chunks, room);
    Box::new(move |measure| {
        let grown = measured(measure, || buffer.grow((chunks + 1) * CHUNK).unwrap());
        assert_eq!(grown.outcome(), Some(outcome));
        grown.close().unwrap();
    })
}

/// In place of the buffer, which is gone after.
fn grow_into(chunks: usize) -> Repeat {
    let mut buffer = Some(chain(&resource_on(Nothing::granting(), Options::new()), chunks, 1));
    Box::new(move |measure| {
        let grown = measured(measure, || buffer.take().unwrap().grow_into((chunks + 1) * CHUNK).unwrap());
        assert_eq!(grown.outcome(), Some(Outcome::InPlace));
        buffer = Some(grown.truncate_into(chunks * CHUNK).unwrap());
    })
}

fn covered(chunks: usize) -> Repeat {
    let buffer = chain(&resource_on(Nothing::granting(), Options::new()), chunks, 0);
    Box::new(move |measure| {
        let alias = measured(measure, || buffer.grow(chunks * CHUNK).unwrap());
        assert_eq!(alias.outcome(), Some(Outcome::Covered));
        alias.close().unwrap();
    })
}

/// Of the last of its memory.
fn close(chunks: usize) -> Repeat {
    let resource = resource_on(Nothing::granting(), Options::new());
    Box::new(move |measure| {
        let mut buffer = Some(chain(&resource, chunks, 0));
        measured(measure, || buffer.take().unwrap().close().unwrap());
    })
}

fn shared(chunks: usize) -> VirtualMemoryBuffer {
    let options = Options::new().handle_kind(HandleKind::PosixFd);
    chain(&resource_on(Nothing::sharing(), options), chunks, 0)
}

fn exported(chunks: usize) -> Repeat {
    let buffer = shared(chunks);
    Box::new(move |measure| drop(measured(measure, || export(&buffer).unwrap())))
}

fn imported(chunks: usize) -> Repeat {
    let buffer = shared(chunks);
    let descriptor = export(&buffer).unwrap();
    let resource = buffer.resource().clone();
    Box::new(move |measure| measured(measure, || import_from(&resource, &descriptor).unwrap()).close().unwrap())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_is_measured_once_a_repetition() {
        for (name, prepare) in OPERATIONS {
            let mut repeat = prepare(3);
            for _ in 0..2 {
                let mut count = 0;
                repeat(&mut |operation| {
                    operation();
                    count += 1;
                });
                assert_eq!(count, 1, "{name}");
            }
        }
    }
}
