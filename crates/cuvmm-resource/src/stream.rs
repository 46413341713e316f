//! [`StreamRef`]: a stream that is kept alive by whoever may have to wait for it.
//!
//! # Safety
//! A stream's handle is alive while its `StreamRef` is: ours is destroyed with the last clone, an owner's is kept by
//! holding the owner, a raw one by the caller's promise.
#![allow(unsafe_code)]

use std::sync::Arc;

use cuvmm_driver::sys::{CUcontext, CUstream, CUstream_flags};
use cuvmm_driver::{Device, Driver, StrandedKind};
use cuvmm_handles::PrimaryContext;

use crate::capture::{Session, Target};
use crate::error::Error;
use crate::reaper;

/// What owns a stream that was made elsewhere.
///
/// ```
/// # use std::sync::Arc;
/// # use cuvmm_driver::{Driver, sys::CUstream};
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// /// Stands for another crate's stream, which that destroys when it is dropped.
/// struct Theirs(StreamRef);
///
/// // SAFETY: the stream is made before the value and destroyed with it.
/// unsafe impl StreamOwner for Theirs {
///     fn driver(&self) -> &Driver {
///         self.0.driver()
///     }
///
///     fn stream(&self) -> CUstream {
///         self.0.as_raw()
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Simulator::new(Machine::h200()).driver()?.device(0)?;
/// let theirs = Arc::new(Theirs(StreamRef::create(&device)?));
/// let options = Options::new().release(Release::Stream(StreamRef::from_owner(theirs)?));
/// let buffer = VirtualMemoryResource::new(&device, options)?.allocate(2 << 20)?;
/// buffer.close()?; // waits for the stream; its owner stays until then
/// # Ok(())
/// # }
/// ```
///
/// # Safety
/// While the value lives, [`stream`](Self::stream) gives one and the same stream, which is alive and one of
/// [`driver`](Self::driver). No capture is begun on it when [`StreamRef::from_raw`] forbids that.
pub unsafe trait StreamOwner: Send + Sync + 'static {
    /// The driver that the stream belongs to.
    fn driver(&self) -> &Driver;

    /// The stream.
    fn stream(&self) -> CUstream;
}

/// A share of a stream: it stays alive while this, or a clone of it, does. Two are equal when they name the same
/// stream of the same driver.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
/// let stream = StreamRef::create(&device)?;
/// let buffer = resource.allocate(2 << 20)?;
/// buffer.fill_on(&stream, 0, buffer.size(), 1)?;
/// stream.synchronize()?;
/// assert_eq!(stream.clone(), stream);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "a stream of ours is destroyed with the last share of it"]
pub struct StreamRef {
    inner: Arc<Inner>,
}

struct Inner {
    driver: Driver,
    stream: CUstream,
    /// The stream's context, asked once; null for a default-stream token that somebody named, which has none of its
    /// own.
    context: CUcontext,
    keep: Keep,
}

/// What keeps the stream alive.
enum Keep {
    /// It is ours; so is a share of its context.
    Ours(#[allow(dead_code, reason = "held for its drop")] PrimaryContext),
    /// It is the legacy default stream of a context, which lives as long as that.
    Context(#[allow(dead_code, reason = "held for its drop")] PrimaryContext),
    /// It is an owner's.
    Owner(#[allow(dead_code, reason = "held for its drop")] Arc<dyn StreamOwner>),
    /// Somebody promised.
    Promise,
}

impl StreamRef {
    /// Makes a stream in the device's primary context that does not wait for the legacy default stream
    /// (`cuStreamCreate`). It is destroyed with the last clone.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuStreamCreate")]
    pub fn create(device: &Device) -> Result<Self, Error> {
        let primary = PrimaryContext::retain(device)?;
        let session = Session::require(Target::legacy(&primary))?;
        let stream = device.driver().stream_create(CUstream_flags::NON_BLOCKING)?;
        drop(session);
        let context = primary.as_raw();
        let driver = device.driver().clone();
        Ok(Self { inner: Arc::new(Inner { driver, stream, context, keep: Keep::Ours(primary) }) })
    }

    /// Shares a stream that `owner` keeps alive.
    ///
    /// # Errors
    /// What `cuStreamGetCtx` answers.
    pub fn from_owner(owner: Arc<impl StreamOwner>) -> Result<Self, Error> {
        let (driver, stream) = (owner.driver().clone(), owner.stream());
        // SAFETY: the owner's promise: the stream is alive while it is, and of that driver.
        unsafe { Self::share(&driver, stream, Keep::Owner(owner)) }
    }

    /// Names a stream, or a default stream by its token (0, 1 or 2). Given to a buffer, a token stands for the legacy
    /// default stream of the primary context of the buffer's device, whatever context is current; as a release stream
    /// it counts as none given.
    ///
    /// # Safety
    /// It is a stream of `driver`, and stays alive while this or a clone of it does: the buffers that it is given to keep one,
    /// also after they are dropped, as long as they are [pending](crate::VirtualMemoryResource::pending).
    ///
    /// Nobody begins a capture on it while a copy, a fill, a wait or a fence of ours is under way, nor while a buffer that waits
    /// for it is dropped by another thread, or is pending: [`drain`](crate::VirtualMemoryResource::drain) the resource first.
    /// An event may be recorded on it then, and a driver can crash on that at the very moment a capture begins (measured).
    ///
    /// # Errors
    /// What `cuStreamGetCtx` answers.
    pub unsafe fn from_raw(driver: &Driver, stream: CUstream) -> Result<Self, Error> {
        // SAFETY: the caller's promise.
        unsafe { Self::share(driver, stream, Keep::Promise) }
    }

    /// The legacy default stream of a device's primary context.
    pub(crate) fn legacy_of(primary: PrimaryContext) -> Self {
        let (driver, context) = (primary.device().driver().clone(), primary.as_raw());
        Self { inner: Arc::new(Inner { driver, stream: CUstream::LEGACY, context, keep: Keep::Context(primary) }) }
    }

    /// # Safety
    /// The stream is alive while `keep` is, and of `driver`.
    unsafe fn share(driver: &Driver, stream: CUstream, keep: Keep) -> Result<Self, Error> {
        let context = if stream.is_default_token() {
            CUcontext::NULL
        } else {
            // SAFETY: the stream is alive.
            unsafe { driver.stream_get_ctx(stream) }?
        };
        Ok(Self { inner: Arc::new(Inner { driver: driver.clone(), stream, context, keep }) })
    }

    /// The driver that it belongs to.
    pub fn driver(&self) -> &Driver {
        &self.inner.driver
    }

    /// The stream itself, for launches and raw calls. A buffer that they use waits for them if this is its
    /// [release stream](crate::VirtualMemoryBuffer::set_release), or [`fence`](crate::VirtualMemoryBuffer::fence) is called
    /// after them; by default it waits for the legacy default stream and blocking ones alone. When no capture is to be begun on
    /// it, [`from_raw`](Self::from_raw) says.
    pub fn as_raw(&self) -> CUstream {
        self.inner.stream
    }

    /// Whether it is a default-stream token.
    pub fn is_default(&self) -> bool {
        self.inner.stream.is_default_token()
    }

    /// Waits for all work queued on it so far, beside whatever is being captured elsewhere.
    ///
    /// # Errors
    /// [`Error::HostCallback`], [`Error::StreamCapturing`] (nothing was waited for); errors of the work, 700 among
    /// them.
    #[doc(alias = "cuStreamSynchronize")]
    pub fn synchronize(&self) -> Result<(), Error> {
        if self.driver().is_in_host_function()? {
            return Err(Error::HostCallback);
        }
        let session = Session::require(self.target())?;
        if session.is_capturing()? {
            return Err(Error::StreamCapturing);
        }
        Ok(session.synchronize()?)
    }

    /// Lets go of this share, as dropping it does, and says how giving back a share of a context went.
    pub(crate) fn end(self) -> Result<(), cuvmm_driver::Error> {
        let Some(mut inner) = Arc::into_inner(self.inner) else { return Ok(()) };
        if !matches!(inner.keep, Keep::Context(_)) {
            return Ok(());
        }
        match std::mem::replace(&mut inner.keep, Keep::Promise) {
            Keep::Context(primary) => primary.release(),
            _ => Ok(()),
        }
    }

    /// The stream and its context, for a [`Session`].
    pub(crate) fn target(&self) -> Target<'_> {
        // SAFETY: the stream is alive while `self` is; its context was asked of the driver and lives as long.
        unsafe { Target::new(&self.inner.driver, self.inner.context, self.inner.stream) }
    }
}

impl PartialEq for StreamRef {
    fn eq(&self, other: &Self) -> bool {
        let (one, other) = (&*self.inner, &*other.inner);
        // A default stream's token names one stream a context.
        one.stream == other.stream && one.context == other.context && one.driver == other.driver
    }
}

impl Eq for StreamRef {}

impl std::fmt::Debug for StreamRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("StreamRef").field(&self.inner.stream.0).finish()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !matches!(self.keep, Keep::Ours(_) | Keep::Context(_)) || self.driver.is_forked() {
            return;
        }
        if matches!(self.driver.is_in_host_function(), Ok(true)) {
            // What no call can be made for here is somebody else's to end.
            let keep = std::mem::replace(&mut self.keep, Keep::Promise);
            let (driver, stream, context) = (self.driver.clone(), self.stream, self.context);
            return reaper::hand_over_stream(StreamRef { inner: Arc::new(Self { driver, stream, context, keep }) });
        }
        if let Keep::Ours(_) = self.keep {
            // SAFETY: the context lives as long as the share of it in `keep`, and the stream, which is of it, until below.
            let (session, _) = Session::enter(unsafe { Target::new(&self.driver, self.context, self.stream) });
            if session.is_destroyed() {
                // It went with its context.
                return;
            }
            // SAFETY: the stream is ours, and this is its last share. Work still queued runs to its end.
            if let Err(error) = unsafe { self.driver.stream_destroy(self.stream) } {
                self.driver.strand(StrandedKind::Other, &error, "a stream was not destroyed");
            }
        }
    }
}
