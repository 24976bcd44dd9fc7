"""One file a method: its client and its server side by side."""

from lit_pfl.methods.agnostic_fl import AgnosticFL
from lit_pfl.methods.apfl import APFL
from lit_pfl.methods.clustered_fl import ClusteredFL
from lit_pfl.methods.ditto import Ditto
from lit_pfl.methods.factorized_fl import FactorizedFL
from lit_pfl.methods.fd import FD
from lit_pfl.methods.fedadmm import FedADMM
from lit_pfl.methods.fedah import FedAH
from lit_pfl.methods.fedala import FedALA
from lit_pfl.methods.fedamp import FedAMP, HeurFedAMP
from lit_pfl.methods.fedavg import FedAvg
from lit_pfl.methods.fedbabu import FedBABU
from lit_pfl.methods.fedbn import FedBN
from lit_pfl.methods.fedcp import FedCP
from lit_pfl.methods.feddbe import FedDBE
from lit_pfl.methods.feddyn import FedDyn
from lit_pfl.methods.fedfomo import FedFOMO
from lit_pfl.methods.fedgen import FedGen
from lit_pfl.methods.fedgh import FedGH
from lit_pfl.methods.fedkd import FedKD
from lit_pfl.methods.fedlc import FedLC
from lit_pfl.methods.fedma import FedMA
from lit_pfl.methods.fednova import FedNova
from lit_pfl.methods.fedntd import FedNTD
from lit_pfl.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedExP, FedYogi
from lit_pfl.methods.fedpac import FedPAC
from lit_pfl.methods.fedper import FedPer
from lit_pfl.methods.fedproto import FedProto
from lit_pfl.methods.fedprox import FedProx
from lit_pfl.methods.fedrep import FedRep
from lit_pfl.methods.fedrod import FedRoD
from lit_pfl.methods.fedrs import FedRS
from lit_pfl.methods.fedslr import FedSLR
from lit_pfl.methods.fedspa import FedSpa
from lit_pfl.methods.fml import FML
from lit_pfl.methods.gpfl import GPFL
from lit_pfl.methods.ifca import IFCA
from lit_pfl.methods.knnper import KNNPer
from lit_pfl.methods.l2gd import L2GD
from lit_pfl.methods.lgfedavg import LGFedAvg
from lit_pfl.methods.moon import MOON
from lit_pfl.methods.perfedavg import PerFedAvg
from lit_pfl.methods.pfedhn import PFedHN
from lit_pfl.methods.pfedme import PFedMe
from lit_pfl.methods.pfedpara import PFedPara
from lit_pfl.methods.psi_net import PsiNet
from lit_pfl.methods.scaffold import Scaffold
from lit_pfl.methods.simfed import SimFed
from lit_pfl.methods.standalone import StandAlone

__all__ = [
    "APFL",
    "FD",
    "FML",
    "GPFL",
    "IFCA",
    "L2GD",
    "MOON",
    "AgnosticFL",
    "ClusteredFL",
    "Ditto",
    "FactorizedFL",
    "FedADMM",
    "FedAH",
    "FedALA",
    "FedAMP",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedCP",
    "FedDBE",
    "FedDyn",
    "FedExP",
    "FedFOMO",
    "FedGH",
    "FedGen",
    "FedKD",
    "FedLC",
    "FedMA",
    "FedNTD",
    "FedNova",
    "FedPAC",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRS",
    "FedRep",
    "FedRoD",
    "FedSLR",
    "FedSpa",
    "FedYogi",
    "HeurFedAMP",
    "KNNPer",
    "LGFedAvg",
    "PFedHN",
    "PFedMe",
    "PFedPara",
    "PerFedAvg",
    "PsiNet",
    "Scaffold",
    "SimFed",
    "StandAlone",
]
