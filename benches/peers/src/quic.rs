//! quinn: QUIC over UDP, which is always encrypted; one stream each.

use std::{hint::black_box, net::SocketAddr, sync::Arc};

use quinn::{ClientConfig, Connection, Endpoint, ServerConfig, TransportConfig, VarInt};
use rustls::{RootCertStore, pki_types::PrivateKeyDer};

use crate::plan::{Fault, Figure, Plan, check_length, parent_is_done, ready};

const NAME: &str = "localhost";
/// Large enough that flow control never stops a tensor.
const WINDOW_BYTES: u32 = 128 << 20;

fn transport() -> Arc<TransportConfig> {
    let mut transport = TransportConfig::default();
    let window = VarInt::from_u32(WINDOW_BYTES);
    transport.stream_receive_window(window).receive_window(window).send_window(WINDOW_BYTES.into());
    Arc::new(transport)
}

/// Prints the address and, in hexadecimal digits, the certificate that the client shall trust.
pub(crate) async fn serve(plan: &Plan) -> Result<(), Fault> {
    let certified = rcgen::generate_simple_self_signed([NAME.to_owned()])?;
    let certificate = certified.cert.der().clone();
    let digits: String = certificate.iter().map(|byte| format!("{byte:02x}")).collect();
    let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der())?;
    let mut config = ServerConfig::with_single_cert(vec![certificate], key)?;
    config.transport_config(transport());
    let endpoint = Endpoint::server(config, SocketAddr::from(([127, 0, 0, 1], 0)))?;
    ready(format!("{},{digits}", endpoint.local_addr()?));
    let source = vec![7; plan.bytes];
    let answer = async {
        while let Some(incoming) = endpoint.accept().await {
            answer(incoming.await?, &source).await;
        }
        Ok(())
    };
    tokio::select! {
        ended = answer => ended,
        () = parent_is_done() => Ok(()),
    }
}

/// Answers until the client leaves.
async fn answer(connection: Connection, source: &[u8]) {
    while let Ok((mut send, mut receive)) = connection.accept_bi().await {
        let mut number = [0; 8];
        if receive.read_exact(&mut number).await.is_err() || send.write_all(source).await.is_err() {
            return;
        }
        // Fails only for a stream that was closed before.
        let _ = send.finish();
    }
}

pub(crate) async fn measure(plan: &Plan, address: &str) -> Result<Figure, Fault> {
    let (address, digits) = address.split_once(',').ok_or("no certificate")?;
    let certificate: Result<Vec<u8>, _> = digits
        .as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(&String::from_utf8_lossy(pair), 16))
        .collect();
    let mut roots = RootCertStore::empty();
    roots.add(certificate?.into())?;
    let mut config = ClientConfig::with_root_certificates(Arc::new(roots))?;
    config.transport_config(transport());
    let mut endpoint = Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    endpoint.set_default_client_config(config);
    let connection = endpoint.connect(address.parse()?, NAME)?.await?;
    let mut target = vec![0; plan.bytes];
    plan.time(async || {
        let (mut send, mut receive) = connection.open_bi().await?;
        send.write_all(&8_u64.to_le_bytes()).await?;
        send.finish()?;
        receive.read_exact(&mut target).await?;
        check_length(plan.bytes, black_box(&target).len())
    })
    .await
}
