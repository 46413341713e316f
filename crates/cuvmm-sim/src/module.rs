//! Modules, their functions, and launching them.

use std::ffi::{CStr, c_char};

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::context::{self, device_of};
use crate::copy;
use crate::kernels::{self, Kernel};
use crate::session::{Answer, In, Session};
use crate::work::{Launch, Work};

/// The most threads of a block.
const BLOCK_THREADS: u64 = 1024;
/// The most threads of a block by direction.
const BLOCK: [u32; 3] = [1024, 1024, 64];
/// The most blocks of a grid by direction.
const GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// The most shared memory of a block that was not asked for before.
const SHARED_BYTES: u32 = 48 << 10;

/// A loaded module. Its functions have the numbers behind its own.
pub(crate) struct Module {
    pub(crate) context: u64,
}

/// How a kernel is launched.
pub(crate) struct Shape {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
}

impl Shape {
    fn check(&self) -> Answer {
        let fits = |asked: [u32; 3], most: [u32; 3]| asked.iter().zip(most).all(|(&n, most)| (1..=most).contains(&n));
        // Of directions that fit, the product does too.
        let threads = || self.block.iter().map(|&n| u64::from(n)).product::<u64>();
        let fits = fits(self.grid, GRID) && fits(self.block, BLOCK) && threads() <= BLOCK_THREADS;
        if fits && self.shared_bytes <= SHARED_BYTES { Ok(()) } else { Err(CUresult::INVALID_VALUE) }
    }
}

/// The module that somebody names.
fn named(session: &mut Session<'_>, module: u64) -> Answer<u64> {
    if session.modules.contains_key(&module) {
        return Ok(module);
    }
    if session.ended.contains(&module) {
        return Err(CUresult::CONTEXT_IS_DESTROYED);
    }
    session.violation(format!("module {module:#x} is not loaded"));
    Err(CUresult::INVALID_HANDLE)
}

/// Loads the one module there is, by its text.
pub(crate) fn load(session: &mut Session<'_>, image: &In<c_char>) -> Answer<CUmodule> {
    image.required()?;
    let context = context::working(session)?;
    if !image.is_text(kernels::PTX) {
        return Err(CUresult::INVALID_IMAGE);
    }
    let id = session.number();
    session.modules.insert(id, Module { context });
    Ok(CUmodule(std::ptr::without_provenance_mut(id as usize)))
}

pub(crate) fn function(session: &mut Session<'_>, module: CUmodule, name: &In<c_char>) -> Answer<CUfunction> {
    name.required()?;
    let module = named(session, module.0.addr() as u64)?;
    let found = Kernel::ALL.iter().position(|(known, _): &(&CStr, Kernel)| name.is_text(known));
    let index = found.ok_or(CUresult::NOT_FOUND)?;
    Ok(CUfunction(std::ptr::without_provenance_mut(module as usize + 1 + index)))
}

pub(crate) fn unload(session: &mut Session<'_>, module: CUmodule) -> Answer {
    let id = named(session, module.0.addr() as u64)?;
    if let Some(context) = session.modules.get(&id).map(|module| module.context) {
        context::intact(session, context)?;
    }
    if session.streams.values().flat_map(|stream| &stream.queue).any(|job| job.work.runs(&|module| module == id)) {
        session.violation("a module is unloaded under queued work");
    }
    session.modules.remove(&id);
    Ok(())
}

/// Launches a function. `values` reads as many of the caller's values, of those widths.
pub(crate) fn launch(
    session: &mut Session<'_>,
    function: CUfunction,
    shape: &Shape,
    stream: CUstream,
    values: impl FnOnce(&[usize]) -> Answer<Vec<u64>>,
) -> Answer {
    let number = function.0.addr() as u64;
    let module = named(session, number & !0xF)?;
    let index = (number & 0xF).checked_sub(1).and_then(|index| usize::try_from(index).ok());
    let &(_, kernel) = index.and_then(|index| Kernel::ALL.get(index)).ok_or(CUresult::INVALID_HANDLE)?;
    shape.check()?;
    let (stream, context) = session.working_stream(stream)?;
    if session.modules.get(&module).is_none_or(|module| module.context != context) {
        return Err(CUresult::INVALID_HANDLE);
    }
    let task = kernel.with(&values(kernel.widths())?).ok_or(CUresult::INVALID_VALUE)?;
    let device = device_of(session, context);
    copy::submit(session, stream, Work::Kernel(Launch { task, device, module }))
}
