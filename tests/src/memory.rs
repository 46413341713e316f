//! Bytes that say where they belong, and buffers that have, or lack, room behind them.

use std::sync::OnceLock;

use cuvmm::handles::Reservation;
use cuvmm::{Release, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource};

use crate::backend::Backend;

/// A MiB.
pub const MIB: usize = 1 << 20;
/// The granularity of the memory of every backend.
pub const G: usize = 2 * MIB;

/// What drivers give at a hint, if anything: addresses come in no smaller pieces behind others.
pub const ROOM: usize = 32 * MIB;

/// A buffer that waits for the stream.
pub fn buffer_on(resource: &VirtualMemoryResource, stream: &StreamRef) -> VirtualMemoryBuffer {
    let buffer = resource.allocate(G).expect("a buffer");
    buffer.set_release(Release::Stream(stream.clone())).expect("a stream of the same driver");
    buffer
}

/// A buffer for captured work, that waits for nothing.
pub fn scratch(backend: &Backend) -> VirtualMemoryBuffer {
    let buffer = backend.resource().allocate(G).expect("a buffer");
    buffer.set_release(Release::Caller).expect("nothing to refuse");
    buffer
}

/// `length` bytes that depend on the seed and on where they are.
pub fn pattern(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|index| (index as u64).wrapping_mul(0x9e37_79b9).to_le_bytes()[2] ^ seed).collect()
}

/// All bytes of a buffer.
pub fn bytes_of(buffer: &VirtualMemoryBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.size()];
    buffer.copy_to_host(0, &mut bytes).expect("a copy to the host");
    bytes
}

/// How many bytes a mark has. There is one at each end of each granule.
const MARK: usize = 4096;

/// Writes marks that depend on the seed all over a buffer.
pub fn write_marks(buffer: &VirtualMemoryBuffer, seed: u8) {
    for (offset, mark) in marks(seed, buffer.size()) {
        buffer.copy_from_host(offset, mark).expect("a copy from the host");
    }
}

/// Demands that the first `bytes` bytes of a buffer hold the marks of that seed.
#[track_caller]
pub fn require_marks(buffer: &VirtualMemoryBuffer, seed: u8, bytes: usize) {
    let mut seen = [0; MARK];
    for (offset, mark) in marks(seed, bytes) {
        buffer.copy_to_host(offset, &mut seen).expect("a copy to the host");
        // Not assert_eq!, which would print all of them.
        assert!(seen == *mark, "no mark of {seed} at {offset:#x} of {:#x}", buffer.size());
    }
}

fn marks(seed: u8, bytes: usize) -> impl Iterator<Item = (usize, &'static [u8])> {
    // Made once: a suite has hundreds of thousands of them.
    static OF_SEED: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    assert_eq!(bytes % G, 0);
    let of_seed = OF_SEED.get_or_init(|| (0..=u8::MAX).map(|seed| pattern(seed, MARK)).collect());
    let offsets = (0..bytes / G).flat_map(|granule| [granule * G, (granule + 1) * G - MARK]);
    // The marks differ from their neighbours; there are more of them than seeds.
    offsets
        .zip((0..=u8::MAX).cycle())
        .map(move |(offset, index)| (offset, &of_seed[seed.wrapping_add(index) as usize][..]))
}

fn at_end(buffer: &VirtualMemoryBuffer) -> Option<Reservation> {
    let driver = buffer.resource().device().driver();
    let end = buffer.address().checked_add(buffer.capacity())?;
    let size = Reservation::GRANULARITY.round_up(ROOM).expect("a size");
    Reservation::at(driver, size, end).ok()
}

/// A buffer of `size` bytes behind whose addresses [`ROOM`] more are free, as long as nobody takes them.
pub fn with_room_behind(resource: &VirtualMemoryResource, size: usize) -> VirtualMemoryBuffer {
    assert!(size > 0, "an empty buffer is nowhere");
    let mut others = Vec::new();
    while others.len() < 64 {
        let buffer = resource.allocate(size).expect("a buffer");
        // A first copy makes the device's context, which takes addresses of its own.
        buffer.fill(0, 1, 0).expect("a fill");
        if at_end(&buffer).is_some() {
            return buffer;
        }
        others.push(buffer);
    }
    panic!("no buffer of 64 has room behind it");
}

/// Takes the addresses behind those of a buffer, as long as the result lives, so that it grows past its capacity by
/// moving. Where they are somebody else's already, they stay that.
pub fn occupy_behind(buffer: &VirtualMemoryBuffer) -> Option<Reservation> {
    at_end(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_granule_has_its_marks() {
        let granules = 300;
        let offsets: Vec<usize> = marks(1, granules * G).map(|(offset, _)| offset).collect();
        assert_eq!(offsets.len(), 2 * granules);
        assert_eq!((offsets[0], offsets[1], offsets[2 * granules - 1]), (0, G - MARK, granules * G - MARK));
    }
}
