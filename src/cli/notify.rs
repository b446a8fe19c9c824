//! Reports the daemon's state to the service manager: systemd's `Type=notify`.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends a line such as `READY=1` to the service manager, if `NOTIFY_SOCKET` is set.
pub(super) fn tell(state: &str) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    // A name that begins with @ is an abstract address, not a file.
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&name),
    };
    if let Err(error) = address.and_then(|address| send(&address, state)) {
        log::warn!("cannot tell the service manager {state} ({}): {error}", name.display());
    }
}

fn send(address: &SocketAddr, state: &str) -> io::Result<()> {
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), address).map(drop)
}
