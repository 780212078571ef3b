//! libibverbs, opened at run time.
//!
//! Nothing links against it. The same binary uses RDMA if the library, the kernel's drivers and a device are present;
//! otherwise an error names the missing one.

use std::{ffi::CStr, io, ptr::NonNull, sync::OnceLock};

use super::{VerbsError, error::Names, sys};

const FILE: &str = "libibverbs.so.1";

/// The functions of libibverbs. The library is opened once and never closed, because its drivers register themselves
/// with the process.
pub struct Library {
    pub(crate) functions: sys::Functions,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("file", &FILE).finish_non_exhaustive()
    }
}

/// Whether RDMA can be used on this machine, and if not, what is missing.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Availability {
    /// The user-space library is missing or too old.
    NoLibrary(VerbsError),
    /// The library is installed, but the kernel has no RDMA support loaded.
    NoKernelSupport,
    /// Library and kernel support are present, but no device.
    NoDevice,
    /// Devices could not be listed.
    Refused(VerbsError),
    /// These devices are present.
    Devices(Vec<String>),
}

impl Availability {
    /// Checks what is present. This is cheap, because no device is opened.
    pub fn probe() -> Self {
        let devices = match Library::open() {
            Ok(library) => library.device_names(),
            Err(error) => return Self::NoLibrary(error),
        };
        match devices {
            Ok(names) if names.is_empty() => Self::NoDevice,
            Ok(names) => Self::Devices(names),
            Err(VerbsError::NoKernelSupport) => Self::NoKernelSupport,
            Err(error) => Self::Refused(error),
        }
    }
}

impl Library {
    /// The library, opened at the first call that finds it.
    ///
    /// # Errors
    /// [`VerbsError::NoLibrary`]: the library is missing, or lacks a function that every release since 2008 has.
    pub fn open() -> Result<&'static Self, VerbsError> {
        static OPENED: OnceLock<Library> = OnceLock::new();
        if let Some(library) = OPENED.get() {
            return Ok(library);
        }
        let library = Self::load()?;
        Ok(OPENED.get_or_init(|| library))
    }

    fn load() -> Result<Self, VerbsError> {
        let missing = |error: libloading::Error| {
            // The error itself only states that the call failed. Its source has the loader's message.
            let source = std::error::Error::source(&error).map(ToString::to_string);
            VerbsError::NoLibrary { reason: source.unwrap_or_else(|| error.to_string()).into() }
        };
        // SAFETY: the library's constructors have no preconditions, and the signatures were generated from its
        // own headers. glibc's dlsym takes the default version of a symbol, the one those headers describe.
        let functions = unsafe { sys::Functions::open(FILE) }.map_err(missing)?;
        Ok(Self { functions })
    }

    /// The names of the devices that are present, in the library's order.
    ///
    /// # Errors
    /// [`VerbsError::NoKernelSupport`], or [`VerbsError::Call`] when the listing is refused.
    pub fn device_names(&'static self) -> Result<Vec<String>, VerbsError> {
        let list = DeviceList::new(self)?;
        Ok(list.devices().map(|device| list.name(device)).collect())
    }

    /// Opens the device of that name.
    pub(crate) fn open_device(&'static self, name: &str) -> Result<NonNull<sys::ibv_context>, VerbsError> {
        let list = DeviceList::new(self)?;
        let Some(device) = list.devices().find(|&device| list.name(device) == name) else {
            let present = Names(list.devices().map(|device| list.name(device)).collect());
            return Err(VerbsError::UnknownDevice { name: name.to_owned(), present });
        };
        // SAFETY: `device` is an entry of a list that is freed only after this call, as the library demands.
        let context = unsafe { self.functions.ibv_open_device(device) };
        super::error::pointer(context, "ibv_open_device", name)
    }
}

/// The library's list of devices, freed on drop.
struct DeviceList {
    library: &'static Library,
    first: NonNull<*mut sys::ibv_device>,
    length: usize,
}

impl DeviceList {
    fn new(library: &'static Library) -> Result<Self, VerbsError> {
        let mut length = 0;
        // SAFETY: `length` is writable.
        let first = unsafe { library.functions.ibv_get_device_list(&raw mut length) };
        let Some(first) = NonNull::new(first) else {
            let error = io::Error::last_os_error();
            return Err(match error.raw_os_error() {
                Some(libc::ENOSYS) => VerbsError::NoKernelSupport,
                _ => super::error::refused(error, "ibv_get_device_list", "list"),
            });
        };
        Ok(Self { library, first, length: usize::try_from(length).unwrap_or(0) })
    }

    fn devices(&self) -> impl Iterator<Item = *mut sys::ibv_device> {
        // SAFETY: the library filled `length` entries, and they stay until the list is freed on drop.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.length) }.iter().copied()
    }

    fn name(&self, device: *mut sys::ibv_device) -> String {
        // SAFETY: `device` comes from this list; the library answers with a C string inside it, or NULL.
        unsafe {
            let name = self.library.functions.ibv_get_device_name(device);
            if name.is_null() { String::new() } else { CStr::from_ptr(name).to_string_lossy().into_owned() }
        }
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from the library and nothing borrowed from it outlives `self`.
        unsafe { self.library.functions.ibv_free_device_list(self.first.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probing_is_repeatable_and_never_fails() {
        let kind = std::mem::discriminant(&Availability::probe());
        assert_eq!(kind, std::mem::discriminant(&Availability::probe()));
    }

    #[test]
    fn opening_a_device_that_is_not_there_says_why() {
        let Ok(library) = Library::open() else { return };
        let error = library.open_device("no such device").map(drop).unwrap_err();
        assert!(
            matches!(error, VerbsError::UnknownDevice { .. } | VerbsError::NoKernelSupport),
            "unexpected: {error}"
        );
    }
}
