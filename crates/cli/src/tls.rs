//! Applies the options of TLS to a worker's settings.

use tensorwire::WorkerBuilder;

#[cfg(feature = "tls")]
use crate::arguments::Names;
use crate::{arguments::Tls, failure::Failure};

/// Applies `options`.
#[cfg(feature = "tls")]
pub(crate) fn apply(builder: WorkerBuilder, options: &Tls) -> Result<WorkerBuilder, Failure> {
    use tensorwire::tls::{TlsIdentity, TlsNames};

    // The command line has all of them or none.
    let (Some(certificate), Some(key), Some(authorities)) =
        (&options.tls_cert, &options.tls_key, &options.tls_ca)
    else {
        return Ok(builder);
    };
    let names = match options.tls_names {
        None | Some(Names::Proven) => TlsNames::Proven,
        Some(Names::AnyHost) => TlsNames::AnyHost,
        Some(Names::AnyMember) => TlsNames::AnyMember,
    };
    Ok(builder.tls(TlsIdentity::from_files(certificate, key, authorities)?).tls_names(names))
}

/// Refuses options that this program does not support: an option for TLS must not lead to a connection without it.
#[cfg(not(feature = "tls"))]
pub(crate) fn apply(builder: WorkerBuilder, options: &Tls) -> Result<WorkerBuilder, Failure> {
    use crate::arguments::{TLS_CA, TLS_CERT, TLS_KEY};

    let given = [
        ("--tls-cert", &options.tls_cert, TLS_CERT),
        ("--tls-key", &options.tls_key, TLS_KEY),
        ("--tls-ca", &options.tls_ca, TLS_CA),
    ];
    match given.into_iter().find_map(|(option, path, variable)| Some((option, path.as_ref()?, variable))) {
        Some((option, path, variable)) => {
            Err(Failure::NoTls { option, value: path.display().to_string(), variable })
        }
        None => Ok(builder),
    }
}
