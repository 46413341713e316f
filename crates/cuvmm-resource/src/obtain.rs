//! Memory for a chunk: what is kept, or what is made, and what is done where there is too little of it.

use std::time::Instant;

use cuvmm_driver::sys::{CUmemAllocationHandleType, CUmemAllocationProp, CUmemLocation};
use cuvmm_driver::{CUresult, Device, MemoryInfo};
use cuvmm_handles::{Allocation, GranularSize, PrimaryContext};

use crate::capture::{Session, Target};
use crate::error::Error;
use crate::kept::{self, Kept};
use crate::settle::PATIENCE;
use crate::shortage::{OutOfMemory, Relief};
use crate::statistics::Counts;

/// How often in a row what is kept is released for one chunk: others may keep more each time.
const RELEASES: u32 = 8;

/// Memory for a chunk.
pub(crate) enum Obtained<'a> {
    /// It was kept there.
    Kept(&'a Kept, Allocation),
    Made(Allocation),
}

/// Takes a chunk that is kept, or makes memory. Where there is not so much, what is kept is released, the own first and then
/// that of others; then what the resource's buffers have left is waited for, a while; then the hook is called once, and all
/// that is done once more; then it is tried as often as the options say. No lock is held. Without any relief, once has to do.
pub(crate) fn obtain<'a>(
    device: &Device,
    size: GranularSize,
    properties: &CUmemAllocationProp,
    kept: Option<&'a Kept>,
    relief: Option<(&Relief, &Counts)>,
) -> Result<Obtained<'a>, Error> {
    let kinds = properties.requested_handle_types;
    let (mut asked, mut retries, mut releases) = (false, 0, 0);
    let mut deadline = None;
    loop {
        let (given_back, released) = (relief.map_or(0, |(_, counts)| counts.given_back()), kept::released());
        // Also what came there meanwhile.
        if let Some((kept, allocation)) = kept.and_then(|kept| Some((kept, kept.take(size.bytes())?))) {
            return Ok(Obtained::Kept(kept, allocation));
        }
        let error = match Allocation::create(device.driver(), size, properties) {
            Ok(allocation) => return Ok(Obtained::Made(allocation)),
            Err(error) => error,
        };
        let (bytes, error) = match error {
            cuvmm_handles::Error::Create { bytes, error } if error.code() == Some(CUresult::OUT_OF_MEMORY) => {
                (bytes, error)
            }
            // What drivers answer without an IMEX channel.
            cuvmm_handles::Error::Create { error, .. }
                if kinds.contains(CUmemAllocationHandleType::FABRIC)
                    && error.code() == Some(CUresult::NOT_PERMITTED) =>
            {
                return Err(Error::HandleKindRefused { kind: kinds.try_into()?, error });
            }
            error => return Err(error.into()),
        };
        if let Some((_, counts)) = relief {
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + PATIENCE);
            if releases < RELEASES && kept::relieve(kept, device, properties.location) {
                releases += 1;
                continue;
            }
            releases = 0;
            if kept::gives_back_more(device, properties.location, released, deadline)
                || counts.gives_back_more(given_back, deadline)
            {
                continue;
            }
        }
        let memory = memory_info(device, properties.location);
        let granularity = size.granularity().bytes();
        let pending = relief.map_or(0, |(_, counts)| counts.pending());
        let shortage = OutOfMemory { requested: bytes, granularity, memory, pending, error };
        let Some((relief, _)) = relief else { return Err(Error::OutOfMemory(shortage)) };
        if !std::mem::replace(&mut asked, true) && relief.ask(&shortage) {
            // What it gave up may go later, and what it did may have taken long.
            deadline = None;
            continue;
        }
        if !relief.wait(retries) {
            return Err(Error::OutOfMemory(shortage));
        }
        retries += 1;
    }
}

/// How much memory the device has, where its primary context is active: a driver tells nobody else.
fn memory_info(device: &Device, location: CUmemLocation) -> Option<MemoryInfo> {
    if location != device.location() || !device.primary_ctx_is_active().ok()? {
        return None;
    }
    let primary = PrimaryContext::retain(device).ok()?;
    let session = Session::require(Target::legacy(&primary)).ok()?;
    let memory = device.driver().mem_get_info().ok();
    drop(session);
    memory
}
